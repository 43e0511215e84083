"""Rows of sources of prompts: read, checked, not yet rendered."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from megarl.config import ConfigError, FileSource, ReasoningGymSource
from megarl.data.answers import Answer
from megarl.data.files import parts, taken_rows
from megarl.data.gym import read_gym
from megarl.data.images import COLUMN, ONE, ImageReader, check_folder
from megarl.data.intake import Intake
from megarl.data.messages import Message, arguments_of, checked, tools_of
from megarl.images import Image

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source before tokenisation."""

    place: str  # its name in error messages, such as "data.train.path: train.jsonl:3"
    prompt: str | list[Message]
    answer: Answer
    meta: dict[str, Any]
    tools: list[dict[str, Any]] | None = None  # schemas of the tools that this row offers
    arguments: dict[str, Any] = field(default_factory=dict)  # of the chat template, for this row
    images: Sequence[Image] = ()  # those of the prompt, in order; each has a mark in its text

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    @property
    def size(self) -> int:
        """The number of bytes of the prompt's texts."""
        return sum(len(message.get("content", "").encode()) for message in self.messages)


def row_of(columns: dict[str, Any], source: FileSource, place: str, key: str, reader: ImageReader | None = None) -> Row:
    """Return a row of a file.

    Args:
        columns: the row's columns.
        source: names the columns of prompt and answer.
        place: the row's name in messages.
        key: the source's dotted key.
        reader: reads images for a model that sees them; None: they are refused.

    Raises:
        ConfigError: the row is malformed.
    """
    prompt, answer, meta = parts(columns, source, place, key)
    if reader is not None:
        meta = {name: value for name, value in meta.items() if name != COLUMN and (name != ONE or isinstance(value, str))}
    prompt, images = seen(prompt, columns, source, place, reader)
    filled = source.path.suffix != ".jsonl"
    return Row(place, checked(prompt, place, filled), answer, meta, tools_of(columns, place, filled), arguments_of(columns, place), images)


def seen(prompt: Any, columns: dict[str, Any], source: FileSource, place: str, reader: ImageReader | None) -> tuple[Any, Sequence[Image]]:
    """Return a row's prompt with marks for its images, and these, as `ImageReader.take` does; unchanged without a reader."""
    if reader is None:
        return prompt, ()
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    marked, images = reader.take(messages, columns, source, place)
    return (marked if images or messages is prompt else prompt), images


def source_rows(source: ReasoningGymSource | FileSource, key: str, intake: Intake, reader: ImageReader | None = None) -> Iterator[Row]:
    """Yield the rows of a source.

    Args:
        source: the source.
        key: its dotted key, such as "data.train".
        intake: what to do with rows that are refused.
        reader: as for `row_of`.

    Raises:
        ConfigError: there are none, or one is refused.
    """
    if isinstance(source, ReasoningGymSource):
        yield from _gym_rows(source, key)
        return
    check_folder(source, reader, key)
    rows = taken_rows(source, key, intake.refuse)
    if (first := next(rows, None)) is None:
        if intake.dropped:
            return
        raise ConfigError(f"{key}.path: {source.path} holds no prompts{f' after the first {source.skip}' if source.skip else ''}")
    yield from intake.each(chain([first], rows), lambda row: row_of(row[1], source, row[0], key, reader))


def _gym_rows(source: ReasoningGymSource, key: str) -> Iterator[Row]:
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
