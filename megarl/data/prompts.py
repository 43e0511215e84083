"""Prompts from reasoning-gym and from JSONL and Parquet files, tokenised and checked before any process starts."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, EpisodeSource, FileSource, MixtureSource, PromptSource, ReasoningGymSource
from megarl.data.files import read_file
from megarl.data.gym import read_gym
from megarl.data.mixture import mixed
from megarl.data.tokenizer import Message, check_size, check_template, encode, first_line, render_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

CHUNK = 4096  # rows tokenised together


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, and what its verifier needs."""

    id: int  # place in its source
    text: str  # the question: the last message of a chat
    ids: Sequence[int] = field(repr=False)  # tokens of the whole prompt, 4 bytes each
    answer: str
    meta: dict[str, Any]  # reasoning-gym's metadata, or the other columns of the row
    given: str | list[Message] = ""  # the question as the source has it, with the messages before it
    episode: int | None = None  # the seed of an episode, which its environment begins: there are no tokens then

    @property
    def tokens(self) -> list[int]:
        """The prompt's tokens, chat template included."""
        return list(self.ids)

    @property
    def seed(self) -> int:
        """Of an environment."""
        return self.id if self.episode is None else self.episode

    @property
    def task(self) -> dict[str, Any] | None:
        """What an environment is told of the prompt."""
        return None if self.episode is not None else {"prompt": self.given, "answer": self.answer, "meta": self.meta}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source before tokenisation."""

    place: str  # what a refusal calls it: "data.train.path: train.jsonl:3"
    prompt: str | list[Message]
    answer: str
    meta: dict[str, Any]


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
) -> list[Prompt]:
    """Every prompt of a source, tokenised; episodes as they are.

    Args:
        source: where they come from.
        tokenizer: the model's.
        chat: each prompt goes through the tokenizer's chat template; else `template` is filled in.
        template: a text with "{prompt}" in it; read without `chat`.
        max_prompt_tokens: a longer prompt is refused.
        key: the source's dotted key, say "data.train".
        limit_key: what a message calls the limit.
        system: a system message before each chat that begins with none.
        tools: schemas of the tools that the chat template tells of.

    Returns:
        The prompts in the order of the source, whose `id` counts them.

    Raises:
        ConfigError: in one line: the first row that is malformed, empty or too long, a source without prompts, chat without a chat
            template, a template without "{prompt}".
    """
    if isinstance(source, EpisodeSource):
        seeds = range(source.seed, source.seed + source.items)
        return [Prompt(number, f"episode {seed}", (), "", {}, episode=seed) for number, seed in enumerate(seeds)]
    if isinstance(source, MixtureSource):
        parts = [
            (
                load_prompts(
                    part.source, tokenizer, chat, template, max_prompt_tokens, f"{key}.parts.{n}.source", limit_key, system, tools
                ),
                part.weight,
            )
            for n, part in enumerate(source.parts)
        ]
        return [replace(prompt, id=number) for number, prompt in enumerate(mixed(parts, source.seed))]
    return tokenised(_rows(source, key), tokenizer, chat, template, max_prompt_tokens, key, limit_key, system, tools)


def tokenised(
    rows: Iterator[Row],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    template: str,
    max_prompt_tokens: int,
    key: str,
    limit_key: str,
    system: str | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[Prompt]:
    """The rows of a source as prompts: `load_prompts` from there on.

    The other arguments and what is refused are as there, but no row at all is no fault.
    """
    section = "data"  # says it for every source
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"{section}.chat: the tokenizer has no chat template; give {section}.template and {section}.chat=false")
    if chat:
        check_template(tokenizer, f"{section}.chat")
    elif "{prompt}" not in template:
        raise ConfigError(f"{section}.template: {template!r} has no {{prompt}} in it")
    prompts: list[Prompt] = []
    while chunk := list(islice(rows, CHUNK)):
        for row in chunk:
            _check_turn(row)
        texts = (
            _chat_texts(tokenizer, chunk, system, tools)
            if chat
            else [template.replace("{prompt}", _question(row, section)) for row in chunk]
        )
        for row, text in zip(chunk, texts, strict=True):
            check_size(tokenizer, text, max_prompt_tokens, f"{row.place}: the prompt", limit_key)
        for row, tokens in zip(chunk, encode(tokenizer, texts, special=not chat), strict=True):
            if not tokens:
                raise ConfigError(f"{row.place}: the prompt has no token")
            if len(tokens) > max_prompt_tokens:
                raise ConfigError(f"{row.place}: prompt of {len(tokens)} tokens is longer than {limit_key}={max_prompt_tokens}")
            prompts.append(Prompt(len(prompts), _text(row), array("I", tokens), row.answer, row.meta, _given(row)))
    return prompts


def _rows(source: ReasoningGymSource | FileSource, key: str) -> Iterator[Row]:
    """The rows of a source. ConfigError where there is none."""
    empty = True
    if isinstance(source, ReasoningGymSource):
        entries, dropped = read_gym(source, key)
        if dropped:
            log.info("%s: %d of %d items left out, their questions are in %s.exclude", key, dropped, source.items, key)
        if not entries:
            raise ConfigError(f"{key}.items: all {source.items} items are in {key}.exclude")
        # Scoring makes the dataset again, with the same parameters.
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


def checked(prompt: Any, place: str) -> str | list[Message]:
    """The prompt, if it is a text or a list of chat messages with something in it; ConfigError, starting with `place`, if not."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{place}: the prompt is empty")
        return prompt
    if not isinstance(prompt, list):
        raise ConfigError(f"{place}: the prompt must be a text or a list of chat messages, not {type(prompt).__name__}")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ConfigError(f"{place}: message {number} of the prompt needs a text 'role' and a text 'content'")
    if not prompt or not prompt[-1]["content"].strip():
        raise ConfigError(f"{place}: the prompt is empty")
    return prompt


def _text(row: Row) -> str:
    return row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]


def _given(row: Row) -> str | list[Message]:
    """The prompt as it stands; a lone message of the user is its text."""
    alone = isinstance(row.prompt, list) and len(row.prompt) == 1 and row.prompt[0]["role"] == "user"
    return _text(row) if alone else row.prompt


def _question(row: Row, section: str) -> str:
    """The text that goes into a template."""
    if isinstance(row.prompt, list) and len(row.prompt) > 1:
        raise ConfigError(f"{row.place}: a chat of {len(row.prompt)} messages needs {section}.chat=true")
    return _text(row)


def _check_turn(row: Row) -> None:
    """ConfigError where the assistant has spoken last: what it said would be read, and not learned."""
    if isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant":
        raise ConfigError(
            f"{row.place}: the prompt ends with the assistant's message; leave it out (megarl sft learns whole conversations: "
            "data.train.type=conversations)"
        )


def instructed(chat: list[Message], system: str | None) -> list[Message]:
    """The chat with the system message before it, unless it has one of its own."""
    return chat if system is None or chat[0]["role"] == "system" else [{"role": "system", "content": system}, *chat]


def _chat_texts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], system: str | None, tools: Sequence[dict[str, Any]] | None
) -> list[str]:
    chats = [[{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt for row in rows]
    chats = [instructed(chat, system) for chat in chats]
    try:
        return render_chats(tokenizer, chats, tools)
    except Exception as error:  # a template may raise anything
        late = isinstance(error, TimeoutError)
        if len(rows) > 1 and not late:  # find the row
            return [text for row in rows for text in _chat_texts(tokenizer, [row], system, tools)]
        prompts = f"one of {len(rows)} prompts from here on" if late else "the prompt"
        raise ConfigError(f"{rows[0].place}: the model's chat template refuses {prompts}: {first_line(error)}") from None
