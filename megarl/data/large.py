"""The prompts of a large Parquet or Arrow file, which are made of its rows when they are asked for.

A million rows as prompts are some gigabytes and minutes of tokenising, at every start and resume. Here the rows stay a table, and what
would be refused is looked for before the start without tokenising all of them: columns as a whole say which rows are empty, malformed, a
chat of several messages, or have so many bytes that they could be too long. Those are read, and so are rows from all over the file. What a
row can still be refused for when it is drawn is a chat template that objects to a text, or a tokenizer that makes it longer.

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

LARGE = 100_000  # rows, from which on a file is read so
SAMPLED = 4096  # rows from all over the file that are read before the start
TOGETHER = 1 << 16  # Parquet rows


def large_table(source: FileSource, key: str) -> pyarrow.Table | None:
    """The rows of a file of `LARGE` rows or more; None for a smaller one and for JSONL. Raises ConfigError where it is unreadable."""
    if source.path.is_dir():
        table = _saved(source.path, f"{key}.path")
    elif source.path.suffix == ".parquet" and source.path.is_file():
        table = _parquet(source, f"{key}.path")
    else:
        return None
    table = None if table is None else table.slice(source.skip, source.rows)
    return table if table is not None and table.num_rows >= LARGE else None


class LargeFile(LazySequence[Prompt]):
    """The prompts of the rows that `source.where` takes of a table; one that was not read before the start is checked when it is asked for.

    Args:
        table: its rows, those that `source.skip` leaves out not among them.
        source: of the table.
        key: the source's dotted key, say "data.train".
        renderer: makes prompts of rows.

    Raises:
        ConfigError: in one line, of a row that is malformed, empty or too long; in `__getitem__` as well.
    """

    def __init__(self, table: pyarrow.Table, source: FileSource, key: str, renderer: Renderer) -> None:
        self._table, self._source, self._key, self._renderer = table, source, key, renderer
        with self._readable():
            self._row_P = chosen_places(table, source.where, source.path, key)
        sample = np.unique(np.linspace(0, len(self) - 1, SAMPLED, dtype=np.int64))
        added = self._added(sample)
        with self._readable():
            table.validate(full=True)  # texts that are none, among others
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
            for run in np.split(row_N, np.flatnonzero(np.diff(row_N) != 1) + 1):  # `take` would join the chunks of a column first
                read += self._table.slice(int(run[0]), len(run)).to_pylist()
        for number, columns in zip(row_N.tolist(), read, strict=True):
            called = f"{self._key}.path: {self._source.path}:{self._source.skip + number + 1}"
            prompt, answer, meta = parts(columns, self._source, called, self._key)
            rows.append(Row(called, checked(prompt, called), answer, meta))
        return rows

    def _readable(self) -> AbstractContextManager[None]:
        return readable(lambda: f"{self._key}.path: {self._source.path} is not readable")

    def _added(self, places: np.ndarray) -> int:
        """The most bytes that the template puts around the prompt of one of these rows."""
        rows = self._rows(places)
        return max(len(text.encode()) - _size(row) for row, text in zip(rows, self._renderer.texts(rows), strict=True))


def _parquet(source: FileSource, key: str) -> pyarrow.Table | None:
    """In batches: as a whole no column of more than 2 GB can be read that is inside of another."""
    import pyarrow

    path, batches = source.path, list[pyarrow.RecordBatch]()
    with open_parquet(path, key, lambda: sum(batch.num_rows for batch in batches)) as file:
        last = file.metadata.num_rows if source.rows is None else min(file.metadata.num_rows, source.skip + source.rows)
        if last - source.skip < LARGE:
            return None
        batches.extend(parquet_batches(file, TOGETHER, path.stat().st_size))
        return pyarrow.Table.from_batches(batches, file.schema_arrow)


def _saved(path: Path, key: str) -> pyarrow.Table | None:
    """Of `datasets` on disk; the rows stay there. None where its files are of different columns, or there are none."""
    import pyarrow
    from pyarrow import ipc

    def table(part: Path) -> pyarrow.Table:
        with readable(lambda: f"{key}: {part} is not readable as Arrow after row 0"):
            return bounded(part.stat().st_size, lambda: ipc.open_stream(pyarrow.memory_map(str(part))).read_all())

    tables = [table(part) for part in arrow_files(path, key)]
    return pyarrow.concat_tables(tables) if len({str(one.schema) for one in tables}) == 1 else None


def _suspicious(table: pyarrow.Table, source: FileSource, room: int) -> np.ndarray:
    """Which rows could be refused [rows], bool: that lack something, are no single message of the user's, or have more bytes than `room`.

    No token is less than a byte of its text, but where a tokenizer makes it longer first. Of columns whose type tells nothing all rows are.
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
    """Bytes of each text; 0 of null."""
    from pyarrow import compute

    return _numpy(compute.binary_length(texts).fill_null(0))


def _blank(texts: pyarrow.Array) -> np.ndarray:
    """Which are null, or nothing but white space."""
    from pyarrow import compute

    return _sizes(compute.utf8_trim_whitespace(texts)) == 0


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _numpy(array: pyarrow.Array) -> np.ndarray:
    found: np.ndarray = array.to_numpy(zero_copy_only=False)
    return found


def _size(row: Row) -> int:
    """Bytes of a row's prompt."""
    texts = [row.prompt] if isinstance(row.prompt, str) else [message["content"] for message in row.prompt]
    return sum(len(text.encode()) for text in texts)
