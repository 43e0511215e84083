"""Pairs of responses to one prompt, the better one first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, PairSource, PreferenceData, PreferenceMixture, PreferenceSource
from megarl.data.columns import at, find
from megarl.data.conversations import Conversation, Script, plain_script, tokenised
from megarl.data.files import taken_rows
from megarl.data.images import COLUMN, COLUMNS, ImageReader, check_folder
from megarl.data.intake import UNUSED, Intake
from megarl.data.messages import ARGUMENTS, TOOLS, Message, arguments_of, check_text, checked, checked_chat, says_something, tools_of
from megarl.data.mixture import Mixture
from megarl.data.prompts import Renderer
from megarl.data.rendering import Lesson, Reply, batches, replies
from megarl.data.rows import Row
from megarl.data.template import ChatTemplate
from megarl.images import Image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 4096  # pairs rendered and tokenised together
NAMES = ("chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, each as a rollout would have produced it, with the end token."""

    chosen: Conversation
    rejected: Conversation
    margin: float  # by how much the chosen one is better; 0 if unknown


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two responses to one prompt before they are rendered."""

    row: Row  # the prompt
    chosen: Message
    rejected: Message
    margin: float


def load_preferences(
    source: PairSource,
    tokenizer: PreTrainedTokenizerBase,
    data: PreferenceData,
    max_tokens: int,
    key: str,
    limit_key: str,
    margins: bool = True,
    reader: ImageReader | None = None,
) -> list[Preference]:
    """Return every pair of a source, tokenised as a rollout would have produced it.

    Args:
        source: the source of the pairs.
        tokenizer: the model's tokenizer.
        data: how prompts are rendered, and what happens to bad rows.
        max_tokens: maximum length of a prompt and a response to it, including the end token.
        key: the source's dotted key, such as "data.train".
        limit_key: the setting that gives the limit, for messages.
        margins: whether the loss reads the pairs' margins; else a column of them is one that nothing uses, and they are 0.
        reader: reads images for a model that sees them; None: they are refused.

    Raises:
        ConfigError: one line: the first row that is refused, for example since it lacks a response or has two equal ones; a source without
            pairs, or a mixture whose weights choose none.
    """
    if isinstance(source, PreferenceMixture):
        parts = [
            (load_preferences(part.source, tokenizer, data, max_tokens, f"{key}.parts.{n}.source", limit_key, margins, reader), part.weight)
            for n, part in enumerate(source.parts)
        ]
        return list(Mixture(parts, source.seed, key))
    check_folder(source, reader, key)
    intake, preferences = Intake.of(data), list[Preference]()
    renderer = Renderer(tokenizer, data, max_tokens, limit_key, intake=intake, reader=reader)
    template = renderer.chat_template

    def preference(item: tuple[_Pair, list[Conversation]]) -> Preference:
        pair, (better, worse) = item
        if better.tokens.tolist() == worse.tokens.tolist():
            raise ConfigError(f"{pair.row.place}: chosen and rejected are the same response")
        return Preference(better, worse, pair.margin)

    pairs = intake.each(taken_rows(source, key, intake.refuse), lambda item: _pair(*item, source, key, intake, margins, reader))
    for batch in batches(pairs, CHUNK, lambda pair: pair.row.size):
        scripts = (
            intake.made(batch, lambda pair: _plain(renderer, pair)) if template is None else _rendered(template, batch, intake, reader)
        )
        preferences += intake.made(tokenised(tokenizer, scripts, max_tokens, limit_key, intake, template is None, reader), preference)
    if not preferences and not intake.dropped:
        raise ConfigError(f"{key}.path: {source.path} holds no pairs{f' after the first {source.skip}' if source.skip else ''}")
    intake.tell(len(preferences), key, f"{limit_key}={max_tokens}")
    return preferences


def _rendered(
    template: ChatTemplate, pairs: Sequence[_Pair], intake: Intake, reader: ImageReader | None
) -> list[tuple[_Pair, list[Script]]]:
    """Return the pairs' prompts and responses as the chat template writes them."""

    def lessons(pair: _Pair) -> tuple[_Pair, list[Lesson]]:
        if pair.row.messages[-1]["role"] == "assistant":
            raise ConfigError(f"{pair.row.place}: the prompt ends with the assistant's message, which belongs to chosen and rejected")
        wholes = [replace(pair.row, prompt=[*pair.row.messages, response]) for response in (pair.chosen, pair.rejected)]
        return pair, [Lesson.of(template, whole, [len(pair.row.messages)]) for whole in wholes]

    def scripts(item: tuple[_Pair, tuple[list[Reply] | ConfigError, ...]]) -> tuple[_Pair, list[Script]]:
        pair, sides = item
        result = list[Script]()
        for name, side in zip(NAMES, sides, strict=True):
            if isinstance(side, ConfigError):
                raise ConfigError(str(side).replace(pair.row.place, f"{pair.row.place}: {name}", 1))
            turns, images = (side, list[Image]()) if reader is None else reader.written(side, pair.row.images, template)
            result.append(Script(pair.row.place, turns, name, images=images))
        return pair, result

    ready = intake.made(pairs, lessons)
    turns = replies(template, [lesson for _, sides in ready for lesson in sides])
    return intake.made(zip([pair for pair, _ in ready], zip(turns[0::2], turns[1::2], strict=True), strict=True), scripts)


def _plain(renderer: Renderer, pair: _Pair) -> tuple[_Pair, list[Script]]:
    sides = dict(zip(NAMES, (pair.chosen, pair.rejected), strict=True))
    for name, side in sides.items():
        if others := sorted(side.keys() - {"role", "content", "weight"}):
            raise ConfigError(f"{pair.row.place}: {name} has {', '.join(others)}, which needs data.chat=true")
    return pair, [plain_script(renderer, pair.row, side["content"], name) for name, side in sides.items()]


def _pair(
    place: str, columns: dict[str, Any], source: PreferenceSource, key: str, intake: Intake, margins: bool, reader: ImageReader | None
) -> _Pair:
    """Return the pair of a row; the arguments are `load_preferences`'s. Raise ConfigError if it is malformed."""
    filled, images = source.path.suffix != ".jsonl", list[Image]()
    if reader is not None:
        columns, images = _with_marks(columns, source, place, reader)
    before, chosen = _side(at(columns, source.chosen_key, place, f"{key}.chosen_key"), "chosen", place, filled)
    other, rejected = _side(at(columns, source.rejected_key, place, f"{key}.rejected_key"), "rejected", place, filled)
    if before != other:
        raise ConfigError(f"{place}: chosen and rejected answer different prompts")
    used = [source.chosen_key, source.rejected_key, *[source.margin_key] * margins, *source.where, TOOLS, ARGUMENTS]
    prompt: str | list[Message] = before
    if not before or find(columns, source.prompt_key) is not None:
        own_prompt = checked(at(columns, source.prompt_key, place, f"{key}.prompt_key"), place, filled)
        prompt = _joined(own_prompt, before, f"{place}: {source.prompt_key}") if before else own_prompt
        used.append(source.prompt_key)
    used += [] if reader is None else COLUMNS if images else [COLUMN]
    intake.note(UNUSED, columns.keys() - {*used, *(name.partition(".")[0] for name in used)})
    row = Row(place, prompt, "", {}, tools_of(columns, place, filled), arguments_of(columns, place), images)
    margin = _margin(find(columns, source.margin_key), place, source.margin_key) if margins else 0.0
    return _Pair(row, chosen, rejected, margin)


def _with_marks(columns: dict[str, Any], source: PreferenceSource, place: str, reader: ImageReader) -> tuple[dict[str, Any], list[Image]]:
    """Return a row with marks in the place of images, and these: of the prompt, or else of the conversations that both sides have whole.

    Raises ConfigError for an image that is not taken, or sides that show different ones.
    """
    if (prompt := find(columns, source.prompt_key)) is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        marked, images = reader.take(messages, columns, source, place)
        return {**columns, source.prompt_key: marked if images or messages is prompt else prompt, **dict.fromkeys(COLUMNS)}, images
    sides = {name: reader.take(find(columns, name), columns, source, place) for name in (source.chosen_key, source.rejected_key)}
    (_, images), (_, others) = sides.values()
    if images != others:
        raise ConfigError(f"{place}: chosen and rejected answer different prompts")
    return {**columns, **{name: marked for name, (marked, _) in sides.items()}, **dict.fromkeys(COLUMNS)}, images


def _joined(prompt: str | list[Message], before: list[Message], place: str) -> list[Message]:
    """Return the conversation before the responses.

    Args:
        prompt: the row's own prompt.
        before: the messages of chosen and rejected before the response.
        place: the start of an error's message.

    Raises:
        ConfigError: the messages neither go on where the prompt ends, nor have it among them, nor begin with how it ends.
    """
    question: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if before[0]["role"] not in ("system", "user"):
        return [*question, *before]
    if isinstance(prompt, str) and any(message["role"] == "user" and message["content"].strip() == prompt.strip() for message in before):
        return before
    if any(question == before[start : start + len(question)] for start in range(len(before))):
        return before
    for count in range(min(len(question), len(before)), 0, -1):
        if question[-count:] == before[:count]:
            return [*question, *before[count:]]
    raise ConfigError(f"{place}: chosen and rejected begin with messages of their own, which do not go on from this prompt")


def _side(value: Any, name: str, place: str, filled: bool) -> tuple[list[Message], Message]:
    """Split a text, or chat messages that end with the assistant's, into (the conversation before the response, the response)."""
    if isinstance(value, str):
        check_text(value, f"{place}: {name}")
        before, response = [], {"role": "assistant", "content": value}
    elif not isinstance(value, list):
        raise ConfigError(f"{place}: {name} must be a text or a list of chat messages, not {type(value).__name__}")
    elif not value or not isinstance(value[-1], dict) or value[-1].get("role") != "assistant":
        raise ConfigError(f"{place}: the messages of {name} must end with one of the assistant's")
    else:
        [*before, response] = checked_chat(value, f"{place}: {name}", filled)
    if not says_something(response):
        raise ConfigError(f"{place}: {name} is empty")
    if not response.get("weight", 1):
        raise ConfigError(f"{place}: {name} has weight 0, and is what the pair is about")
    return before, response


def _margin(value: Any, place: str, name: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{place}: {name} must be a number >= 0, not {value!r}")
    return float(value)
