"""What a teacher reads in the place of the policy's prompt: the same question, and what the policy is not shown of it.

SDFT (arXiv:2601.19897) shows a demonstration of the row, SDPO (arXiv:2601.20802) a successful response of the same group, or what the
verifier says about the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import ConfigError, DistillationSettings, PromptFormat, TrainConfig
from megarl.config.model import OF_ROLLOUTS
from megarl.data.answers import text_of
from megarl.data.images import ImageReader, reader_of
from megarl.data.messages import arguments_of, tools_of
from megarl.data.prompts import Prompt, Renderer
from megarl.data.rows import Row
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import hint
from megarl.images import MARK
from megarl.models.description import ModelDescription
from megarl.text.reasoning import after_reasoning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN = "1"  # for a solution and feedback, where prompts are checked before there are any


@dataclass(frozen=True)
class Attempt:
    """One response to a prompt."""

    text: str
    reward: float | None  # None: it has none
    feedback: str | None = None  # what the verifier says about it


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
        self._settings = settings
        self._template = [(literal, name) for literal, name, _, _ in Formatter().parse(settings.prompt)]
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
        """Make the teacher's prompts of these, with a short solution and feedback.

        Raises:
            ConfigError: a row has not what the template names, the template does not place its images, or the teacher's prompt is too long.
        """
        self._renderer.prompts([self._row(prompt, STAND_IN, STAND_IN) for prompt in prompts], range(len(prompts)))

    def made(self, prompt: Prompt, attempts: Sequence[Attempt]) -> list[np.ndarray | None]:
        """Make what the teacher reads before each response to a prompt.

        Args:
            prompt: the prompt.
            attempts: the responses.

        Returns:
            The tokens, int32, for each response; None: no other response is a solution, the verifier says nothing, or it does not fit.

        Raises:
            ConfigError: as `check` does.
        """
        if not self._settings.shows_rollouts:
            return [self._rendered(self._row(prompt))] * len(attempts)
        made = dict[tuple[str, str], np.ndarray | None]()
        shown = [self._shown(attempts, number) for number in range(len(attempts))]
        for texts in dict.fromkeys(filter(None, shown)):
            row = self._row(prompt, *texts)
            try:
                made[texts] = self._rendered(row)
            except ConfigError:  # too long, or of characters that no prompt may have: the policy wrote it
                made[texts] = None
        return [None if texts is None else made[texts] for texts in shown]

    def _shown(self, attempts: Sequence[Attempt], number: int) -> tuple[str, str] | None:
        """The solution and the feedback for a response, "" where the template names none; None if one that it names is not there."""
        solution = self._solution(attempts, number) if self._settings.shows("solution") else ""
        feedback = attempts[number].feedback if self._settings.shows("feedback") else ""
        return None if solution is None or feedback is None else (solution, feedback)

    def _solution(self, attempts: Sequence[Attempt], number: int) -> str | None:
        """The answer, without reasoning before it, of the first other response that is a solution; None if there is none."""
        others = (one for other, one in enumerate(attempts) if other != number)
        right = (one for one in others if one.reward is not None and one.reward >= self._settings.success)
        return next((text for one in right if (text := after_reasoning(one.text).strip())), None)

    def _rendered(self, row: Row) -> np.ndarray:
        [made] = self._renderer.prompts([row], [0])
        return np.array(made.ids, np.int32)

    def _row(self, prompt: Prompt, solution: str = "", feedback: str = "") -> Row:
        given = prompt.given
        question = given if isinstance(given, str) else given[-1].get("content", "")
        if MARK in question and (count := sum(name == "prompt" for _, name in self._template)) != 1:
            raise ConfigError(f"distillation.prompt: {prompt.name} has images, and its {{prompt}} stands {count} times here, not once")
        text = self._filled(prompt, question, {"solution": solution, "feedback": feedback})
        images = [placed.image for placed in prompt.images]
        messages = text if isinstance(given, str) else [*given[:-1], {**given[-1], "content": text}]
        place = f"distillation.prompt: {prompt.name}"
        tools, arguments = tools_of(prompt.meta, place, filled=True), arguments_of(prompt.meta, place)
        return Row(place, messages, prompt.answer, {}, tools, arguments, images)

    def _filled(self, prompt: Prompt, question: str, rollouts: Mapping[str, str]) -> str:
        """The template with the values of a row, and of its responses; `question`: its last message, with marks for its images."""
        own = {"prompt": question if MARK in question else prompt.text, "answer": text_of(prompt.answer), **rollouts}
        parts = []
        for literal, name in self._template:
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
        known = ["prompt", "answer", *OF_ROLLOUTS, *meta]
        raise ConfigError(f"distillation.prompt: {place} has no column {name!r}{hint(name, known)} (there are {', '.join(known)})")
    return value
