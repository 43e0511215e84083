"""What a teacher reads in the place of the policy's prompt: the same question, and what the policy is not shown of it.

SDFT (arXiv:2601.19897) shows a demonstration of the row, SDPO (arXiv:2601.20802) a successful response of the same group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import ConfigError, DistillationSettings, PromptFormat, TrainConfig
from megarl.data.answers import text_of
from megarl.data.images import ImageReader, reader_of
from megarl.data.messages import arguments_of, tools_of
from megarl.data.prompts import Prompt, Renderer
from megarl.data.rendering import THOUGHT
from megarl.data.rows import Row
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import hint
from megarl.images import MARK
from megarl.models.description import ModelDescription

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN = "1"  # for a solution, where prompts are checked before there is any


@dataclass(frozen=True)
class Attempt:
    """One response to a prompt."""

    text: str
    reward: float | None  # None: it has none


class TeacherPrompts:
    """Makes a teacher's prompts.

    Args:
        settings: the section `distillation`, with `prompt`.
        tokenizer: the model's tokenizer.
        data: how prompts are rendered.
        most: maximum number of tokens of such a prompt.
        limit_key: what sets this limit, for messages.
        reader: places the images of prompts of a model that sees them.
    """

    def __init__(
        self,
        settings: DistillationSettings,
        tokenizer: PreTrainedTokenizerBase,
        data: PromptFormat,
        most: int,
        limit_key: str,
        reader: ImageReader | None = None,
    ) -> None:
        assert settings.prompt is not None
        self._settings, self._template = settings, settings.prompt
        self._renderer = Renderer(tokenizer, data, most, limit_key, reader=reader)

    @classmethod
    def of(cls, config: TrainConfig) -> TeacherPrompts | None:
        """Those of a run; None if its teacher reads the policy's prompts, or there is none. They fit into a context and a micro-batch."""
        settings, response = config.distillation, config.rollout.max_response_tokens
        if settings is None or settings.prompt is None:
            return None
        paths = [config.model.path, *settings.models.values()]
        room, key = min((ModelDescription.read(path, drop_images=config.model.drop_images).room, "the model's context") for path in paths)
        room, key = min((room, key), (config.train.micro_batch_tokens, "train.micro_batch_tokens"))
        limit_key = f"{key} less rollout.max_response_tokens: {room}-{response}"
        reader = reader_of(config.model, room - response, limit_key)
        return cls(settings, load_tokenizer(config.model.path), config.data, room - response, limit_key, reader)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Make the teacher's prompts of these, with a short solution.

        Raises:
            ConfigError: a row has not what the template names, the template does not place its images, or the teacher's prompt is too long.
        """
        self._renderer.prompts([self._row(prompt, STAND_IN) for prompt in prompts], range(len(prompts)))

    def made(self, prompt: Prompt, attempts: Sequence[Attempt]) -> list[np.ndarray | None]:
        """Make what the teacher reads before each response to a prompt.

        Args:
            prompt: the prompt.
            attempts: the responses.

        Returns:
            The tokens, int32, for each response; None: no other response is a solution, or none that fits.

        Raises:
            ConfigError: as `check` does.
        """
        if not self._settings.shows_solution:
            return [self._rendered(self._row(prompt, ""))] * len(attempts)
        made = dict[str, np.ndarray | None]()
        chosen = [self._solution(attempts, number) for number in range(len(attempts))]
        for solution in filter(None, dict.fromkeys(chosen)):
            row = self._row(prompt, solution)
            try:
                made[solution] = self._rendered(row)
            except ConfigError:  # too long, or of characters that no prompt may have: the policy wrote it
                made[solution] = None
        return [None if solution is None else made[solution] for solution in chosen]

    def _solution(self, attempts: Sequence[Attempt], number: int) -> str | None:
        """The answer, without reasoning before it, of the first other response that is a solution; None if there is none."""
        others = (one for other, one in enumerate(attempts) if other != number)
        right = (one for one in others if one.reward is not None and one.reward >= self._settings.success)
        return next((text for one in right if (text := one.text.rpartition(THOUGHT)[2].strip())), None)

    def _rendered(self, row: Row) -> np.ndarray:
        [made] = self._renderer.prompts([row], [0])
        return np.array(made.ids, np.int32)

    def _row(self, prompt: Prompt, solution: str) -> Row:
        given = prompt.given
        question = given if isinstance(given, str) else given[-1].get("content", "")
        if MARK in question and (count := sum(name == "prompt" for _, name, _, _ in Formatter().parse(self._template))) != 1:
            raise ConfigError(f"distillation.prompt: {prompt.name} has images, and its {{prompt}} stands {count} times here, not once")
        text, images = self._filled(prompt, solution, question), [placed.image for placed in prompt.images]
        messages = text if isinstance(given, str) else [*given[:-1], {**given[-1], "content": text}]
        place = f"distillation.prompt: {prompt.name}"
        tools, arguments = tools_of(prompt.meta, place, filled=True), arguments_of(prompt.meta, place)
        return Row(place, messages, prompt.answer, {}, tools, arguments, images)

    def _filled(self, prompt: Prompt, solution: str, question: str) -> str:
        """The template with the values of a row; `question`: the prompt's last message, with marks for its images."""
        own = {"prompt": question if MARK in question else prompt.text, "answer": text_of(prompt.answer), "solution": solution}
        parts = []
        for literal, name, _, _ in Formatter().parse(self._template):
            value = "" if name is None else own[name] if name in own else _column(prompt.meta, name, prompt.name)
            parts += [literal, text_of(value)]
        return "".join(parts)


def _column(meta: Mapping[str, Any], name: str, place: str) -> Any:
    """The value of a column; a dot looks inside dictionaries. Raises ConfigError if the row has none."""
    value: Any = meta.get(name)
    if value is None and "." in name:
        value = meta
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        known = ["prompt", "answer", "solution", *meta]
        raise ConfigError(f"distillation.prompt: {place} has no column {name!r}{hint(name, known)} (there are {', '.join(known)})")
    return value
