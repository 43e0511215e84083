"""The prompts of a large Parquet or Arrow file, which are made from its rows on demand.

A million rows as prompts would take several gigabytes, and minutes of tokenising at every start and resume. Here the rows stay in a table,
and most rows that would be refused are found before the start without tokenising all of them: operations on whole columns show which rows
are empty, malformed, chats of several messages, have enough bytes to be too long, or characters that the tokenizer may not have. These are
checked fully, and so is a sample from all over the file. A row can then be refused when it is drawn only if the chat template objects to
its text, or the tokenizer makes it longer.

Axes: P prompts, N of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import ConfigError, FileSource
from megarl.data.columns import chosen_places, find_in_table
from megarl.data.exact import exact_rows
from megarl.data.files import arrow_files, bounded, open_parquet, parquet_batches, readable
from megarl.data.images import check_folder
from megarl.data.lazy import LazySequence
from megarl.data.messages import ARGUMENTS, TOOLS
from megarl.data.prompts import CHUNK, Prompt, Renderer
from megarl.data.rows import Row, row_of
from megarl.data.tokenizer import doubtful_characters, special_tokens

if TYPE_CHECKING:
    import pyarrow

LARGE = 100_000  # files with at least this many rows are read in this way
SAMPLED = 4096  # rows from all over the file that are checked before the start
TOGETHER = 1 << 16  # Parquet rows per batch


def large_table(source: FileSource, key: str, images: bool = False) -> pyarrow.Table | None:
    """Return the rows of a file of at least `LARGE` rows.

    Args:
        source: the file.
        key: the source's dotted key.
        images: the model sees images. Parquet that holds their bytes is then not read, since a table of it would be in memory.

    Returns:
        The rows; None for a smaller file and for JSONL.

    Raises:
        ConfigError: the file is unreadable.
    """
    if source.path.is_dir():
        table = _saved(source.path, f"{key}.path")
    elif source.path.suffix == ".parquet" and source.path.is_file():
        table = _parquet(source, f"{key}.path", images)
    else:
        return None
    table = None if table is None else table.slice(source.skip, source.rows)
    return table if table is not None and table.num_rows >= LARGE else None


class LargeFile(LazySequence[Prompt]):
    """The prompts of the rows of a table that `source.where` selects; a row not read before the start is checked when it is requested.

    Args:
        table: the rows, without those that `source.skip` leaves out.
        source: the source of the table.
        key: the source's dotted key, such as "data.train".
        renderer: makes prompts from rows.

    Raises:
        ConfigError: one line: a row is malformed, empty or too long; also raised from `__getitem__`.
    """

    def __init__(self, table: pyarrow.Table, source: FileSource, key: str, renderer: Renderer) -> None:
        self._table, self._source, self._key, self._renderer = table, source, key, renderer
        check_folder(source, renderer.reader, key)
        with self._readable():
            self._row_P = chosen_places(table, source.where, source.path, key)
        sample = np.unique(np.linspace(0, len(self) - 1, SAMPLED, dtype=np.int64))
        ids = [prompt.id for prompt in self._make(sample)]
        room = renderer.most - 2 * renderer.added if ids else -1
        special = None if renderer.chat_template is None else special_tokens(renderer.tokenizer).pattern
        patterns = [pattern for pattern in (special, doubtful_characters(renderer.tokenizer)) if pattern is not None]
        with self._readable():
            table.validate(full=True)  # finds invalid UTF-8, among others
            suspects = np.setdiff1d(np.flatnonzero(_suspicious(table, source, room, "|".join(patterns) or None)[self._row_P]), sample)
        for first in range(0, len(suspects), CHUNK):
            ids += [prompt.id for prompt in self._make(suspects[first : first + CHUNK])]
        self._row_P = np.delete(self._row_P, np.setdiff1d(np.union1d(sample, suspects), np.array(ids, dtype=np.int64)))

    def sample(self) -> list[Prompt]:
        """Return prompts from all over the file."""
        return self._make(np.unique(np.linspace(0, len(self) - 1, SAMPLED, dtype=np.int64)))

    def leave_out(self, places: Sequence[int]) -> None:
        """Leave out the prompts at these indices, so that later ones move up."""
        self._row_P = np.delete(self._row_P, np.array(places, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._row_P)

    def __iter__(self) -> Iterator[Prompt]:
        for first in range(0, len(self), CHUNK):
            yield from self._at(range(first, min(first + CHUNK, len(self))))

    def _at(self, places: Sequence[int]) -> list[Prompt]:
        prompts = {prompt.id: prompt for prompt in self._make(np.array(places, dtype=np.int64))}
        return [prompts[place] if place in prompts else self._next(place) for place in places]

    def _next(self, place: int) -> Prompt:
        """Return the prompt of the next good row in place of one that is left out when it is drawn."""
        why = self._renderer.intake.last
        for other in range(place + 1, place + len(self)):
            if prompts := self._make(np.array([other % len(self)])):
                print(f"megarl: {self._key}: a row is left out as it is drawn, and the next takes its place: {why}", file=sys.stderr)
                return replace(prompts[0], id=place)
        raise ConfigError(f"{self._key}: nothing is left: {why}")

    def _make(self, places: np.ndarray) -> list[Prompt]:
        values, row_N = list[dict[str, Any]](), self._row_P[places]
        with self._readable():
            for run in np.split(row_N, np.flatnonzero(np.diff(row_N) != 1) + 1):  # `take` would first concatenate a column's chunks
                values += exact_rows(self._table.slice(int(run[0]), len(run)), self._source.answer_key)

        def row(item: tuple[int, int, dict[str, Any]]) -> tuple[Row, int]:
            place, number, columns = item
            called = f"{self._key}.path: {self._source.path}:{self._source.skip + number + 1}"
            return row_of(columns, self._source, called, self._key, self._renderer.reader), place

        rows = self._renderer.intake.made(zip(places.tolist(), row_N.tolist(), values, strict=True), row)
        return self._renderer.prompts([one for one, _ in rows], [place for _, place in rows])

    def _readable(self) -> AbstractContextManager[None]:
        return readable(lambda: f"{self._key}.path: {self._source.path} is not readable")


def _parquet(source: FileSource, key: str, images: bool) -> pyarrow.Table | None:
    """Return a Parquet file's rows; None if they are few. Reads in batches, since a nested column above 2 GB cannot be read at once."""
    import pyarrow

    path, batches = source.path, list[pyarrow.RecordBatch]()
    with open_parquet(path, key, lambda: sum(batch.num_rows for batch in batches)) as file:
        last = file.metadata.num_rows if source.rows is None else min(file.metadata.num_rows, source.skip + source.rows)
        if last - source.skip < LARGE or (images and any("binary" in str(kind) for kind in file.schema_arrow.types)):
            return None
        batches.extend(parquet_batches(file, TOGETHER, path.stat().st_size))
        return pyarrow.Table.from_batches(batches, file.schema_arrow)


def _saved(path: Path, key: str) -> pyarrow.Table | None:
    """Return the rows of a directory written by `datasets`, which stay on disk; None if it has no files or their columns differ."""
    import pyarrow
    from pyarrow import ipc

    def table(part: Path) -> pyarrow.Table:
        with readable(lambda: f"{key}: {part} is not readable as Arrow after row 0"):
            return bounded(part.stat().st_size, lambda: ipc.open_stream(pyarrow.memory_map(str(part))).read_all())

    tables = [table(part) for part in arrow_files(path, key)]
    return pyarrow.concat_tables(tables) if len({str(one.schema) for one in tables}) == 1 else None


def _suspicious(table: pyarrow.Table, source: FileSource, room: int, special: str | None) -> np.ndarray:
    """Return which rows might be refused, or are to be counted.

    Something is missing, it is not a single user message or has more bytes than fit, it contains something special, or it has tools or
    arguments of its own. A text cannot have more tokens than bytes, unless the tokenizer lengthens it first.

    Args:
        table: the rows.
        source: names the columns.
        room: the number of bytes that fit.
        special: pattern of special tokens, and of characters that the tokenizer may not have; None: nothing is looked for.

    Returns:
        bool [rows]; all rows count if the columns' types say too little.
    """
    prompt, answer = find_in_table(table, source.prompt_key), find_in_table(table, source.answer_key)
    bad_prompts = None if prompt is None else _bad_prompts(prompt, room, special)
    bad_answers = None if answer is None else _bad_answers(answer)
    if bad_prompts is None or bad_answers is None:
        return np.ones(table.num_rows, dtype=bool)
    own = [table[name].is_valid().to_numpy() for name in (TOOLS, ARGUMENTS) if table.column_names.count(name) == 1]
    return np.logical_or.reduce([bad_prompts, bad_answers, *own])


def _bad_answers(column: pyarrow.ChunkedArray) -> np.ndarray | None:
    from pyarrow import compute, types

    if types.is_floating(column.type):
        return ~compute.is_finite(column).fill_null(False).to_numpy()
    return column.is_null().to_numpy() if _is_text(column.type) or types.is_integer(column.type) else None


def _bad_prompts(column: pyarrow.ChunkedArray, room: int, special: str | None) -> np.ndarray | None:
    from pyarrow import types

    kind = column.type
    if _is_text(kind):
        return np.concatenate([_bad_texts(chunk, room, special) for chunk in column.chunks])
    message = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else None
    if message is None or not types.is_struct(message):
        return None
    fields = {message.field(index).name: message.field(index).type for index in range(message.num_fields)}
    if fields.keys() != {"role", "content"} or not all(map(_is_text, fields.values())):
        return None
    return np.concatenate([_bad_chats(chunk, room, special) for chunk in column.chunks])


def _bad_chats(chats: pyarrow.ListArray, room: int, special: str | None) -> np.ndarray:
    from pyarrow import compute

    count = _numpy(compute.list_value_length(chats).fill_null(0))
    messages = chats.flatten()
    role, content = compute.struct_field(messages, "role"), compute.struct_field(messages, "content")
    bad_messages = _bad_texts(content, room, special) | ~_numpy(compute.equal(role, "user").fill_null(False))
    bad, singles = count != 1, np.flatnonzero(count == 1)
    bad[singles] = bad_messages[(np.cumsum(count) - 1)[singles]]
    return bad


def _bad_texts(texts: pyarrow.Array, room: int, special: str | None) -> np.ndarray:
    """Return which texts are null or blank, have more bytes than `room`, or contain something special."""
    import pyarrow
    from pyarrow import compute

    bad: np.ndarray = (_sizes(texts) > room) | (_sizes(compute.utf8_trim_whitespace(texts)) == 0)
    if special is None:
        return bad
    try:
        return bad | _numpy(compute.match_substring_regex(texts, special).fill_null(True))
    except pyarrow.ArrowInvalid:  # more tokens than its regular expressions can hold
        return np.ones(len(texts), dtype=bool)


def _sizes(texts: pyarrow.Array) -> np.ndarray:
    """Return the number of bytes of each text; 0 for null."""
    from pyarrow import compute

    return _numpy(compute.binary_length(texts).fill_null(0))


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _numpy(array: pyarrow.Array) -> np.ndarray:
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
