"""The prompts of a large Parquet or Arrow file, which are made from its rows on demand.

A million rows as prompts would take several gigabytes, and minutes of tokenising at every start and resume. Here the rows stay in a table,
and most rows that would be refused are found before the start without tokenising all of them: operations on whole columns show which rows
are empty, malformed, chats of several messages, or have enough bytes to be too long. These are checked fully, and so is a sample from all
over the file. A row can then be refused when it is drawn only if the chat template objects to its text, or the tokenizer makes it longer.

Axes: P prompts, N of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import FileSource
from megarl.data.columns import chosen_places, find_in_table
from megarl.data.files import arrow_files, bounded, open_parquet, parquet_batches, parts, readable
from megarl.data.lazy import LazySequence
from megarl.data.overlong import Overlong
from megarl.data.prompts import CHUNK, Prompt, Renderer, Row, checked

if TYPE_CHECKING:
    import pyarrow

LARGE = 100_000  # files with at least this many rows are read in this way
SAMPLED = 4096  # rows from all over the file that are checked before the start
TOGETHER = 1 << 16  # Parquet rows per batch


def large_table(source: FileSource, key: str) -> pyarrow.Table | None:
    """Return the rows of a file of at least `LARGE` rows; None for a smaller one and for JSONL. Raise ConfigError if it is unreadable."""
    if source.path.is_dir():
        table = _saved(source.path, f"{key}.path")
    elif source.path.suffix == ".parquet" and source.path.is_file():
        table = _parquet(source, f"{key}.path")
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
        with self._readable():
            self._row_P = chosen_places(table, source.where, source.path, key)
        sample = np.unique(np.linspace(0, len(self) - 1, SAMPLED, dtype=np.int64))
        added = self._added(sample)
        with self._readable():
            table.validate(full=True)  # finds invalid UTF-8, among others
            suspects = np.flatnonzero(_suspicious(table, source, renderer.most - 2 * added)[self._row_P])
        made = list[int]()
        for first in range(0, len(checks := np.union1d(sample, suspects)), CHUNK):
            made += [prompt.id for prompt in self._make(checks[first : first + CHUNK])]
        self._row_P = np.delete(self._row_P, np.setdiff1d(checks, np.array(made, dtype=np.int64)))  # what data.overlong=drop leaves out
        renderer.overlong = Overlong()

    def __len__(self) -> int:
        return len(self._row_P)

    def __iter__(self) -> Iterator[Prompt]:
        for first in range(0, len(self), CHUNK):
            yield from self._make(np.arange(first, min(first + CHUNK, len(self))))

    def _at(self, places: Sequence[int]) -> list[Prompt]:
        return self._make(np.array(places, dtype=np.int64))

    def _make(self, places: np.ndarray) -> list[Prompt]:
        return self._renderer.prompts(self._rows(places), places.tolist())

    def _rows(self, places: np.ndarray) -> list[Row]:
        rows, read, row_N = [], list[dict[str, Any]](), self._row_P[places]
        with self._readable():
            for run in np.split(row_N, np.flatnonzero(np.diff(row_N) != 1) + 1):  # `take` would first concatenate a column's chunks
                read += self._table.slice(int(run[0]), len(run)).to_pylist()
        for number, columns in zip(row_N.tolist(), read, strict=True):
            called = f"{self._key}.path: {self._source.path}:{self._source.skip + number + 1}"
            prompt, answer, meta = parts(columns, self._source, called, self._key)
            rows.append(Row(called, checked(prompt, called), answer, meta))
        return rows

    def _readable(self) -> AbstractContextManager[None]:
        return readable(lambda: f"{self._key}.path: {self._source.path} is not readable")

    def _added(self, places: np.ndarray) -> int:
        """Return the maximum number of bytes that the template adds to the prompt of one of these rows."""
        rows = self._rows(places)
        return max(len(text.encode()) - _size(row) for row, text in zip(rows, self._renderer.texts(rows), strict=True))


def _parquet(source: FileSource, key: str) -> pyarrow.Table | None:
    """Return a Parquet file's rows; None if they are few. Reads in batches, since a nested column above 2 GB cannot be read at once."""
    import pyarrow

    path, batches = source.path, list[pyarrow.RecordBatch]()
    with open_parquet(path, key, lambda: sum(batch.num_rows for batch in batches)) as file:
        last = file.metadata.num_rows if source.rows is None else min(file.metadata.num_rows, source.skip + source.rows)
        if last - source.skip < LARGE:
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


def _suspicious(table: pyarrow.Table, source: FileSource, room: int) -> np.ndarray:
    """Return which rows might be refused, bool [rows]: something is missing, not a single user message, or more bytes than `room`.

    A text cannot have more tokens than bytes, unless the tokenizer lengthens it first. All rows count if the columns' types say too little.
    """
    prompt, answer = find_in_table(table, source.prompt_key), find_in_table(table, source.answer_key)
    bad_prompts = None if prompt is None else _bad_prompts(prompt, room)
    bad_answers = None if answer is None else _bad_answers(answer)
    return np.ones(table.num_rows, dtype=bool) if bad_prompts is None or bad_answers is None else bad_prompts | bad_answers


def _bad_answers(column: pyarrow.ChunkedArray) -> np.ndarray | None:
    from pyarrow import compute, types

    if types.is_floating(column.type):
        return ~compute.is_finite(column).fill_null(False).to_numpy()
    return column.is_null().to_numpy() if _is_text(column.type) or types.is_integer(column.type) else None


def _bad_prompts(column: pyarrow.ChunkedArray, room: int) -> np.ndarray | None:
    from pyarrow import types

    kind = column.type
    if _is_text(kind):
        return np.concatenate([(_sizes(chunk) > room) | _blank(chunk) for chunk in column.chunks])
    message = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else None
    if message is None or not types.is_struct(message):
        return None
    fields = {message.field(index).name: message.field(index).type for index in range(message.num_fields)}
    if fields.keys() != {"role", "content"} or not all(map(_is_text, fields.values())):
        return None
    return np.concatenate([_bad_chats(chunk, room) for chunk in column.chunks])


def _bad_chats(chats: pyarrow.ListArray, room: int) -> np.ndarray:
    from pyarrow import compute

    count = _numpy(compute.list_value_length(chats).fill_null(0))
    messages = chats.flatten()
    role, content = compute.struct_field(messages, "role"), compute.struct_field(messages, "content")
    bad_messages = (_sizes(content) > room) | _blank(content) | ~_numpy(compute.equal(role, "user").fill_null(False))
    bad, alone = count != 1, np.flatnonzero(count == 1)
    bad[alone] = bad_messages[(np.cumsum(count) - 1)[alone]]
    return bad


def _sizes(texts: pyarrow.Array) -> np.ndarray:
    """Return the number of bytes of each text; 0 for null."""
    from pyarrow import compute

    return _numpy(compute.binary_length(texts).fill_null(0))


def _blank(texts: pyarrow.Array) -> np.ndarray:
    """Return which texts are null, or nothing but white space."""
    from pyarrow import compute

    return _sizes(compute.utf8_trim_whitespace(texts)) == 0


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _numpy(array: pyarrow.Array) -> np.ndarray:
    found: np.ndarray = array.to_numpy(zero_copy_only=False)
    return found


def _size(row: Row) -> int:
    """Return the number of bytes of a row's prompt."""
    texts = [row.prompt] if isinstance(row.prompt, str) else [message["content"] for message in row.prompt]
    return sum(len(text.encode()) for text in texts)
