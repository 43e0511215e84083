"""Load prompts from reasoning-gym, from files and from environments' episodes; they are checked before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, EpisodeSource, FileSource, MixtureSource, PromptSource, SourceFormat
from megarl.data.answers import Answer
from megarl.data.images import ImageReader
from megarl.data.intake import Intake
from megarl.data.large import LargeFile, large_table
from megarl.data.lazy import LazySequence
from megarl.data.mixture import Mixture
from megarl.data.prompts import Prompt, Renderer
from megarl.data.rows import source_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Faults = Callable[[Sequence[Answer]], Mapping[int, str]]
"""Returns what is wrong with answers, by their index."""


def load_prompts(
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    data: SourceFormat,
    max_prompt_tokens: int,
    key: str,
    limit_key: str = "rollout.max_prompt_tokens",
    tools: Sequence[dict[str, Any]] | None = None,
    faults: Faults | None = None,
    reader: ImageReader | None = None,
) -> Sequence[Prompt]:
    """Return every prompt of a source, tokenised except for episodes. Episodes and the prompts of a large file are made on demand.

    Args:
        source: the source of the prompts.
        tokenizer: the model's tokenizer.
        data: how prompts are rendered, and what happens to rows that are too long or otherwise bad.
        max_prompt_tokens: maximum length of a prompt.
        key: the source's dotted key, such as "data.train".
        limit_key: the setting that gives the limit, for messages.
        tools: schemas of the tools, for the chat template.
        faults: finds what is wrong with answers; None: nothing scores by them.
        reader: reads images for a model that sees them; None: they are refused.

    Returns:
        The prompts in the order of the source; `id` counts them.

    Raises:
        ConfigError: one line: the first row that is refused; a source without prompts, or a mixture whose weights choose none; `chat`
            without a chat template; a template without "{prompt}".
    """
    if isinstance(source, EpisodeSource):
        return _Episodes(source)
    if isinstance(source, MixtureSource):
        parts = [
            (
                load_prompts(part.source, tokenizer, data, max_prompt_tokens, f"{key}.parts.{n}.source", limit_key, tools, faults, reader),
                part.weight,
            )
            for n, part in enumerate(source.parts)
        ]
        return _PromptMixture(parts, source.seed, key)
    intake = Intake.of(data)
    renderer = Renderer(tokenizer, data, max_prompt_tokens, limit_key, tools, intake, reader)
    table = large_table(source, key, reader is not None) if isinstance(source, FileSource) else None
    prompts: Sequence[Prompt]
    if isinstance(source, FileSource) and table is not None:
        prompts = LargeFile(table, source, key, renderer)
    else:
        prompts = renderer.all(source_rows(source, key, intake, reader))
    if faults is not None:
        prompts = _with_good_answers(prompts, faults, intake)
    intake.tell(len(prompts), key, f"{limit_key}={max_prompt_tokens}")
    return prompts


def _with_good_answers(prompts: Sequence[Prompt], faults: Faults, intake: Intake) -> Sequence[Prompt]:
    """Return the prompts without those, of a large file within a sample, whose answers `intake` leaves out."""
    candidates = prompts.sample() if isinstance(prompts, LargeFile) else list(prompts)
    bad = set[int]()
    for number, fault in faults([prompt.answer for prompt in candidates]).items():
        intake.refuse(ConfigError(f"{candidates[number].place}: {fault}"))
        bad.add(candidates[number].id)
    if isinstance(prompts, LargeFile):
        prompts.leave_out(sorted(bad))
        return prompts
    return [replace(prompt, id=number) for number, prompt in enumerate(one for one in candidates if one.id not in bad)] if bad else prompts


class _Episodes(LazySequence[Prompt]):
    """The episodes of a source, made on demand since there may be a billion."""

    def __init__(self, source: EpisodeSource) -> None:
        self._seeds = range(source.seed, source.seed + source.items)

    def __len__(self) -> int:
        return len(self._seeds)

    def _at(self, places: Sequence[int]) -> list[Prompt]:
        seeds = [self._seeds[place] for place in places]
        return [Prompt(place, f"episode {seed}", (), "", {}, episode=seed) for place, seed in zip(places, seeds, strict=True)]


class _PromptMixture(Mixture[Prompt]):
    """A mixture of prompts whose `id` counts those of all sources."""

    def _at(self, places: Sequence[int]) -> list[Prompt]:
        return [replace(prompt, id=place) for place, prompt in zip(places, super()._at(places), strict=True)]
