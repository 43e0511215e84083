"""Pairs of responses to one prompt, the better one first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, PairSource, PreferenceData, PreferenceMixture, PreferenceSource
from megarl.data.columns import at, find
from megarl.data.conversations import Conversation, ended
from megarl.data.files import taken_rows
from megarl.data.mixture import Mixture
from megarl.data.overlong import Overlong
from megarl.data.prompts import Prompt, Renderer, Row, checked
from megarl.data.tokenizer import Message, check_size, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 4096  # pairs tokenised together


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, each as a rollout would have produced it, with the end token."""

    chosen: Conversation
    rejected: Conversation
    margin: float  # by how much the chosen one is better; 0 if unknown


@dataclass(frozen=True, slots=True)
class _Texts:
    """A pair before its responses are tokenised."""

    place: str  # its name in error messages
    prompt: Prompt
    chosen: str
    rejected: str
    margin: float


def load_preferences(
    source: PairSource, tokenizer: PreTrainedTokenizerBase, data: PreferenceData, max_tokens: int, key: str, limit_key: str
) -> list[Preference]:
    """Return every pair of a source, tokenised as a rollout would have produced it.

    Args:
        source: the source of the pairs.
        tokenizer: the model's tokenizer.
        data: determines how prompts are rendered (`chat`, `template`, `system`), and what happens to overlong pairs.
        max_tokens: maximum length of a prompt and a response to it, including the end token.
        key: the source's dotted key, such as "data.train".
        limit_key: the setting that gives the limit, for messages.

    Raises:
        ConfigError: one line: whatever `load_prompts` refuses about the prompts; the first row that lacks a response, has an empty one or
            two equal ones, or is too long; a source without pairs, or a mixture whose weights choose none.
    """
    if isinstance(source, PreferenceMixture):
        parts = [
            (load_preferences(part.source, tokenizer, data, max_tokens, f"{key}.parts.{n}.source", limit_key), part.weight)
            for n, part in enumerate(source.parts)
        ]
        return list(Mixture(parts, source.seed, key))
    overlong = Overlong(data.overlong == "drop")
    renderer = Renderer(tokenizer, data.chat, data.template, max_tokens, limit_key, data.system, overlong=overlong)
    pairs = [_read(prompt) for prompt in renderer.all(_rows(source, key))]
    if not pairs and not overlong.dropped:
        raise ConfigError(f"{key}.path: {source.path} holds no pairs{f' after the first {source.skip}' if source.skip else ''}")

    def sized(pair: _Texts) -> _Texts:
        for name, text in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            check_size(tokenizer, text, max_tokens, f"{pair.place}: {name}", limit_key)
        return pair

    def preference(item: tuple[_Texts, list[int], list[int]]) -> Preference:
        pair, chosen, rejected = item
        if chosen == rejected:
            raise ConfigError(f"{pair.place}: chosen and rejected are the same response")
        called = f"{pair.place}: prompt and response"
        better, worse = (ended(pair.prompt, ids, tokenizer.eos_token_id, max_tokens, called, limit_key) for ids in (chosen, rejected))
        return Preference(better, worse, pair.margin)

    preferences = list[Preference]()
    for first in range(0, len(pairs), CHUNK):
        if chunk := overlong.made(pairs[first : first + CHUNK], sized):
            responses = encode(tokenizer, [text for pair in chunk for text in (pair.chosen, pair.rejected)], special=False)
            preferences += overlong.made(zip(chunk, responses[0::2], responses[1::2], strict=True), preference)
    overlong.tell(len(preferences), key, f"{limit_key}={max_tokens}")
    return preferences


def _read(prompt: Prompt) -> _Texts:
    """Return the pair that a prompt from `_rows` carries."""
    return _Texts(prompt.meta["place"], prompt, prompt.answer, prompt.meta["rejected"], prompt.meta["margin"])


def _rows(source: PreferenceSource, key: str) -> Iterator[Row]:
    """Yield the rows of a file as prompts, with the chosen response as the answer and the rest of the pair in `meta`."""
    for place, row in taken_rows(source, key):
        before, chosen = _side(at(row, source.chosen_key, place, f"{key}.chosen_key"), "chosen", place)
        other, rejected = _side(at(row, source.rejected_key, place, f"{key}.rejected_key"), "rejected", place)
        if before != other:
            raise ConfigError(f"{place}: chosen and rejected answer different prompts")
        prompt = before or at(row, source.prompt_key, place, f"{key}.prompt_key")
        meta = {"place": place, "rejected": rejected, "margin": _margin(find(row, source.margin_key), place, source.margin_key)}
        yield Row(place, checked(prompt, place), chosen, meta)


def _side(value: Any, name: str, place: str) -> tuple[list[Message], str]:
    """Split a string, or chat messages that end with the assistant's, into (the conversation before the response, the response)."""
    before, response = [], value
    if isinstance(value, list):
        if not value or not isinstance(value[-1], dict) or value[-1].get("role") != "assistant":
            raise ConfigError(f"{place}: the messages of {name} must end with one of the assistant's")
        before, response = value[:-1], value[-1].get("content")
    if not isinstance(response, str):
        raise ConfigError(f"{place}: {name} must be a text or a list of chat messages, not {type(response).__name__}")
    if not response.strip():
        raise ConfigError(f"{place}: {name} is empty")
    return before, response


def _margin(value: Any, place: str, name: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{place}: {name} must be a number >= 0, not {value!r}")
    return float(value)
