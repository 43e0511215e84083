"""Prompts, which are made from the rows of a source: checked, rendered and tokenised."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import ConfigError, PromptFormat
from megarl.data.answers import Answer
from megarl.data.chat import Chat
from megarl.data.images import UNSHOWN, ImageReader, shown, unshown
from megarl.data.intake import Intake, TooLong
from megarl.data.messages import ARGUMENTS, TOOLS, Message
from megarl.data.rendering import Reply, continued, prompt_texts
from megarl.data.rows import Row
from megarl.data.template import ChatTemplate
from megarl.data.tokenizer import check_known, check_size, encode, unended
from megarl.images import PlacedImage

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
    answer: Answer
    meta: dict[str, Any]  # reasoning-gym's metadata, or the other columns of the row
    given: str | list[Message] = ""  # the question as in the source, with any messages before it; `MARK` stands for each image
    episode: int | None = None  # the seed of an episode, which the environment opens; there are then no tokens
    place: str = field(default="", repr=False, compare=False)  # the row's name in messages
    images: Sequence[PlacedImage] = ()  # in order; their tokens are among the prompt's

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.place or f"prompt {self.id} of its source"

    @property
    def tokens(self) -> list[int]:
        """The prompt's tokens, including those of the chat template."""
        return list(self.ids)

    @property
    def seed(self) -> int:
        """The seed for an environment."""
        return self.id if self.episode is None else self.episode

    @property
    def shown(self) -> str | list[Message]:
        """`given` as others read it, with "<image>" for each image."""
        return shown(self.given)

    @property
    def task(self) -> dict[str, Any] | None:
        """The parts of the prompt that are passed to an environment, once `shown_task` has written its images; None for an episode."""
        return None if self.episode is not None else {"prompt": self.given, "answer": self.answer, "meta": self.meta}


class Renderer:
    """Make prompts from rows: render and tokenise them, and refuse invalid ones.

    Args:
        tokenizer: the model's tokenizer.
        data: the format of prompts.
        most: maximum number of tokens of a prompt.
        limit_key: the setting that gives this limit, for messages.
        tools: schemas of the tools, for the chat template.
        intake: what to do with rows that are refused.
        reader: writes the images of rows that have some.

    Attributes:
        added: the maximum number of bytes that rendering has added to a prompt.

    Raises:
        ConfigError: one line: `data.chat` without a chat template, or a template without "{prompt}".
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: PromptFormat,
        most: int,
        limit_key: str,
        tools: Sequence[dict[str, Any]] | None = None,
        intake: Intake | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        if not data.chat and "{prompt}" not in data.template:
            raise ConfigError(f"{SECTION}.template: {data.template!r} has no {{prompt}} in it")
        self.intake, self.added = intake or Intake(), 0
        self.chat_template = ChatTemplate(tokenizer, data, tools, self.intake) if data.chat else None
        self.tokenizer, self.most, self.limit_key, self._template = tokenizer, most, limit_key, data.template
        self.reader = reader
        if self.chat_template is not None:
            self.chat_template.sees = reader is not None

    def prompts(self, rows: Sequence[Row], ids: Sequence[int]) -> list[Prompt]:
        """Return the rows as prompts with these ids, without those that `intake` leaves out. Raise ConfigError for a refused one."""

        def sized(item: tuple[tuple[Row, int], str]) -> tuple[tuple[Row, int], str]:
            (row, _), text = item
            self.added = max(self.added, len(text.encode()) - row.size)
            check_size(self.tokenizer, text, self.most, f"{row.place}: the prompt", self.limit_key)
            return item

        def prompt(item: tuple[tuple[tuple[Row, int], str], Sequence[int]]) -> Prompt:
            ((row, number), _), tokens = item
            self.intake.note(UNSHOWN, () if row.images else unshown(row.meta))
            if not tokens:
                raise ConfigError(f"{row.place}: the prompt has no token")
            if len(tokens) > self.most:
                raise TooLong(f"{row.place}: prompt of {len(tokens)} tokens is longer than {self.limit_key}={self.most}")
            placed = self.reader.placed(np.array(tokens), row.images, row.place) if self.reader is not None else ()
            ids, text = array("I", tokens), str(shown(_text(row)))
            return Prompt(number, text, ids, row.answer, row.meta, _given(row), place=row.place, images=placed)

        items = self.intake.made(self._rendered(list(zip(rows, ids, strict=True))), sized)
        tokens = encode(self.tokenizer, [text for _, text in items], special=self.chat_template is None) if items else []
        return self.intake.made(zip(items, tokens, strict=True), prompt)

    def _rendered(self, rows: Sequence[tuple[Row, int]]) -> list[tuple[tuple[Row, int], str]]:
        template = self.chat_template
        if template is None:
            return self.intake.made(rows, lambda item: (item, self.plain(item[0])))

        def chat(item: tuple[Row, int]) -> tuple[tuple[Row, int], Chat]:
            row, _ = item
            check_turn(row)
            return item, template.chat(row.messages, row.place, row.tools, row.arguments)

        chats = self.intake.made(rows, chat)
        texts = prompt_texts(template, [(row.place, chat) for (row, _), chat in chats], known=True)
        rendered = self.intake.taken(zip([item for item, _ in chats], texts, strict=True))
        if self.reader is None:
            return rendered
        return [(item, self.reader.written([Reply(text, "", "")], item[0].images, template)[0][0].read) for item, text in rendered]

    def plain(self, row: Row) -> str:
        """Return the row's prompt in `data.template`. Raise ConfigError if it needs a chat template."""
        for name, value in ((TOOLS, row.tools), (ARGUMENTS, row.arguments)):
            if value:
                raise ConfigError(f"{row.place}: the column {name} needs {SECTION}.chat=true")
        if len(row.messages) > 1:
            raise ConfigError(f"{row.place}: a chat of {len(row.messages)} messages needs {SECTION}.chat=true")
        if row.images:
            raise ConfigError(f"{row.place}: images need {SECTION}.chat=true")
        self.intake.note("keys of messages that nothing uses", row.messages[0].keys() - {"role", "content"})
        check_known(self.tokenizer, _text(row), f"{row.place}: the prompt")
        return self._template.replace("{prompt}", _text(row))

    @property
    def end(self) -> str:
        """The token that ends a response."""
        return str(self.tokenizer.eos_token) if self.chat_template is None else self.chat_template.end

    def response(self, prompt_text: str, text: str) -> str:
        """Return a response as it follows what is read: without an end token, and without a <think> that is already open."""
        return continued(prompt_text, unended(text, self.end, str(self.tokenizer.eos_token)))

    def all(self, rows: Iterator[Row]) -> list[Prompt]:
        """Return the rows of a source as prompts with ids from 0; having no rows at all is not an error."""
        prompts: list[Prompt] = []
        while chunk := list(islice(rows, CHUNK)):
            prompts += self.prompts(chunk, range(len(prompts), len(prompts) + len(chunk)))
        return [replace(prompt, id=number) for number, prompt in enumerate(prompts)] if self.intake.dropped else prompts


def _text(row: Row) -> str:
    return str(row.messages[-1]["content"])


def _given(row: Row) -> str | list[Message]:
    """Return the prompt as in the source, or only the text if it is a single user message."""
    is_single = len(row.messages) == 1 and row.messages[0]["role"] == "user"
    if is_single or isinstance(row.prompt, str):
        return _text(row)
    return row.prompt


def check_turn(row: Row) -> None:
    """Raise ConfigError if the last message is the assistant's, which would be context only and not be learned."""
    if row.messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{row.place}: the prompt ends with the assistant's message; leave it out (megarl sft learns whole conversations: "
            "data.train.type=conversations)"
        )
