"""Prompts, which are made from the rows of a source: checked, rendered and tokenised."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError
from megarl.data.overlong import Overlong, TooLong
from megarl.data.tokenizer import Message, check_size, check_template, encode, first_line, render_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 4096  # rows tokenised together
SECTION = "data"  # the configuration section that determines the format for all sources


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, and the data that its verifier needs."""

    id: int  # index in its source
    text: str  # the question; of a chat, the last message
    ids: Sequence[int] = field(repr=False)  # tokens of the whole prompt, 4 bytes each
    answer: str
    meta: dict[str, Any]  # reasoning-gym's metadata, or the other columns of the row
    given: str | list[Message] = ""  # the question as in the source, with any messages before it
    episode: int | None = None  # the seed of an episode, which the environment opens; there are then no tokens

    @property
    def tokens(self) -> list[int]:
        """The prompt's tokens, including those of the chat template."""
        return list(self.ids)

    @property
    def seed(self) -> int:
        """The seed for an environment."""
        return self.id if self.episode is None else self.episode

    @property
    def task(self) -> dict[str, Any] | None:
        """The parts of the prompt that are passed to an environment; None for an episode."""
        return None if self.episode is not None else {"prompt": self.given, "answer": self.answer, "meta": self.meta}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source before tokenisation."""

    place: str  # its name in error messages, such as "data.train.path: train.jsonl:3"
    prompt: str | list[Message]
    answer: str
    meta: dict[str, Any]


class Renderer:
    """Make prompts from rows: render and tokenise them, and refuse invalid ones.

    Args:
        tokenizer: the model's tokenizer.
        chat: render each prompt with the tokenizer's chat template; otherwise fill in `template`.
        template: a text that contains "{prompt}"; used only if `chat` is false.
        most: maximum number of tokens of a prompt.
        limit_key: the setting that gives this limit, for messages.
        system: a system message for each chat that does not begin with one.
        tools: schemas of the tools, for the chat template.
        overlong: what to do with longer prompts.

    Raises:
        ConfigError: one line: `chat` without a chat template, or a template without "{prompt}".
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: bool,
        template: str,
        most: int,
        limit_key: str,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        overlong: Overlong | None = None,
    ) -> None:
        if chat and not tokenizer.chat_template:
            raise ConfigError(f"{SECTION}.chat: the tokenizer has no chat template; give {SECTION}.template and {SECTION}.chat=false")
        if chat:
            check_template(tokenizer, f"{SECTION}.chat")
        elif "{prompt}" not in template:
            raise ConfigError(f"{SECTION}.template: {template!r} has no {{prompt}} in it")
        self.tokenizer, self.most, self.limit_key = tokenizer, most, limit_key
        self._chat, self._template = chat, template
        self._system, self._tools = system, tools
        self.overlong = overlong or Overlong()

    def prompts(self, rows: Sequence[Row], ids: Sequence[int]) -> list[Prompt]:
        """Return the rows as prompts with these ids, without those that `overlong` drops. Raise ConfigError for the first refused one."""

        def sized(item: tuple[Row, int, str]) -> tuple[Row, int, str]:
            row, _, text = item
            check_size(self.tokenizer, text, self.most, f"{row.place}: the prompt", self.limit_key)
            return item

        def prompt(item: tuple[tuple[Row, int, str], Sequence[int]]) -> Prompt:
            (row, number, _), tokens = item
            if not tokens:
                raise ConfigError(f"{row.place}: the prompt has no token")
            if len(tokens) > self.most:
                raise TooLong(f"{row.place}: prompt of {len(tokens)} tokens is longer than {self.limit_key}={self.most}")
            return Prompt(number, _text(row), array("I", tokens), row.answer, row.meta, _given(row))

        items = self.overlong.made(zip(rows, ids, self.texts(rows), strict=True), sized)
        tokens = encode(self.tokenizer, [text for _, _, text in items], special=not self._chat) if items else []
        return self.overlong.made(zip(items, tokens, strict=True), prompt)

    def texts(self, rows: Sequence[Row]) -> list[str]:
        """Return the rendered text of each row. Raise ConfigError for one that is malformed or that the chat template refuses."""
        for row in rows:
            _check_turn(row)
        if self._chat:
            return _chat_texts(self.tokenizer, rows, self._system, self._tools)
        return [self._template.replace("{prompt}", _question(row, SECTION)) for row in rows]

    def all(self, rows: Iterator[Row]) -> list[Prompt]:
        """Return the rows of a source as prompts with ids from 0; having no rows at all is not an error."""
        found: list[Prompt] = []
        while chunk := list(islice(rows, CHUNK)):
            found += self.prompts(chunk, range(len(found), len(found) + len(chunk)))
        return [replace(prompt, id=number) for number, prompt in enumerate(found)] if self.overlong.dropped else found


def checked(prompt: Any, place: str) -> str | list[Message]:
    """Return the prompt if it is a non-empty string or list of chat messages; otherwise raise ConfigError, starting with `place`."""
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
    """Return the unchanged prompt, or only the text if it is a single user message."""
    alone = isinstance(row.prompt, list) and len(row.prompt) == 1 and row.prompt[0]["role"] == "user"
    return _text(row) if alone else row.prompt


def _question(row: Row, section: str) -> str:
    """Return the text to fill into a template. Raise ConfigError for a chat of several messages."""
    if isinstance(row.prompt, list) and len(row.prompt) > 1:
        raise ConfigError(f"{row.place}: a chat of {len(row.prompt)} messages needs {section}.chat=true")
    return _text(row)


def _check_turn(row: Row) -> None:
    """Raise ConfigError if the last message is the assistant's, which would be context only and not be learned."""
    if isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant":
        raise ConfigError(
            f"{row.place}: the prompt ends with the assistant's message; leave it out (megarl sft learns whole conversations: "
            "data.train.type=conversations)"
        )


def instructed(chat: list[Message], system: str | None) -> list[Message]:
    """Return the chat with the system message before it, unless it begins with one of its own."""
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
        if len(rows) > 1 and not late:  # render the rows one by one to find the refused one
            return [text for row in rows for text in _chat_texts(tokenizer, [row], system, tools)]
        prompts = f"one of {len(rows)} prompts from here on" if late else "the prompt"
        raise ConfigError(f"{rows[0].place}: the model's chat template refuses {prompts}: {first_line(error)}") from None
