"""A prompt, and how it is made of a row of a source: checked, rendered and tokenised."""

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
SECTION = "data"  # says it for every source


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


class Renderer:
    """Makes prompts of rows: the text that the model reads, its tokens, and what is refused of them.

    Args:
        tokenizer: the model's.
        chat: each prompt goes through the tokenizer's chat template; else `template` is filled in.
        template: a text with "{prompt}" in it; read without `chat`.
        most: tokens that a prompt may have.
        limit_key: what a message calls that limit.
        system: a system message before each chat that begins with none.
        tools: schemas of the tools that the chat template tells of.
        overlong: what becomes of longer prompts.

    Raises:
        ConfigError: in one line: chat without a chat template, a template without "{prompt}".
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
        """The rows as prompts of these ids, less what `overlong` leaves out. ConfigError in one line: the first that is refused."""

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
        """What the model reads of each row. ConfigError for one that is malformed, or that the chat template refuses."""
        for row in rows:
            _check_turn(row)
        if self._chat:
            return _chat_texts(self.tokenizer, rows, self._system, self._tools)
        return [self._template.replace("{prompt}", _question(row, SECTION)) for row in rows]

    def all(self, rows: Iterator[Row]) -> list[Prompt]:
        """The rows of a source as prompts that count from 0; no row at all is no fault."""
        found: list[Prompt] = []
        while chunk := list(islice(rows, CHUNK)):
            found += self.prompts(chunk, range(len(found), len(found) + len(chunk)))
        return [replace(prompt, id=number) for number, prompt in enumerate(found)] if self.overlong.dropped else found


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
