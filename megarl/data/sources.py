"""Load prompts from reasoning-gym, from files and from environments' episodes; they are checked before any process starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, EpisodeSource, FileSource, MixtureSource, PromptSource, ReasoningGymSource
from megarl.data.files import read_file
from megarl.data.gym import read_gym
from megarl.data.large import LargeFile, large_table
from megarl.data.lazy import LazySequence
from megarl.data.mixture import Mixture
from megarl.data.overlong import Overlong
from megarl.data.prompts import Prompt, Renderer, Row, checked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def load_prompts(
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    template: str,
    max_prompt_tokens: int,
    key: str,
    limit_key: str = "rollout.max_prompt_tokens",
    system: str | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    drop: bool = False,
) -> Sequence[Prompt]:
    """Return every prompt of a source, tokenised except for episodes. Episodes and the prompts of a large file are made on demand.

    Args:
        source: the source of the prompts.
        tokenizer: the model's tokenizer.
        chat: render each prompt with the tokenizer's chat template; otherwise fill in `template`.
        template: a text that contains "{prompt}"; used only if `chat` is false.
        max_prompt_tokens: maximum length of a prompt; a longer one is refused, or left out.
        key: the source's dotted key, such as "data.train".
        limit_key: the setting that gives the limit, for messages.
        system: a system message for each chat that does not begin with one.
        tools: schemas of the tools, for the chat template.
        drop: leave out longer prompts.

    Returns:
        The prompts in the order of the source; `id` counts them.

    Raises:
        ConfigError: one line: the first row that is malformed, empty or too long; a source without prompts, or a mixture whose weights
            choose none; `chat` without a chat template; a template without "{prompt}".
    """
    if isinstance(source, EpisodeSource):
        return _Episodes(source)
    if isinstance(source, MixtureSource):
        rest = (tokenizer, chat, template, max_prompt_tokens)
        parts = [
            (load_prompts(part.source, *rest, f"{key}.parts.{n}.source", limit_key, system, tools, drop), part.weight)
            for n, part in enumerate(source.parts)
        ]
        return _PromptMixture(parts, source.seed, key)
    overlong = Overlong(drop)
    renderer = Renderer(tokenizer, chat, template, max_prompt_tokens, limit_key, system, tools, overlong)
    table = large_table(source, key) if isinstance(source, FileSource) else None
    prompts: Sequence[Prompt]
    if isinstance(source, FileSource) and table is not None:
        prompts = LargeFile(table, source, key, renderer)
    else:
        prompts = renderer.all(_rows(source, key))
    overlong.tell(len(prompts), key, f"{limit_key}={max_prompt_tokens}")
    return prompts


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


def _rows(source: ReasoningGymSource | FileSource, key: str) -> Iterator[Row]:
    """Yield the rows of a source. Raise ConfigError if there are none."""
    empty = True
    if isinstance(source, ReasoningGymSource):
        entries, dropped = read_gym(source, key)
        if dropped:
            log.info("%s: %d of %d items left out, their questions are in %s.exclude", key, dropped, source.items, key)
        if not entries:
            raise ConfigError(f"{key}.items: all {source.items} items are in {key}.exclude")
        # The parameters are kept, since scoring creates the data set again with them.
        for number, entry in enumerate(entries):
            meta = {**entry["metadata"], "source_params": source.params}
            answer = "" if entry["answer"] is None else str(entry["answer"])
            yield Row(f"{key}: item {number}", checked(entry["question"], f"{key}: item {number}"), answer, meta)
        return
    for place, prompt, answer, meta in read_file(source, key):
        empty = False
        yield Row(place, checked(prompt, place), answer, meta)
    if empty:
        raise ConfigError(f"{key}.path: {source.path} holds no prompts{f' after the first {source.skip}' if source.skip else ''}")
