"""The prompts of a large Parquet or Arrow file, which are made of its rows when they are asked for.

A million rows as prompts are some gigabytes and minutes of tokenising, at every start and resume. Here the rows stay a table, and what
would be refused is looked for before the start without tokenising all of them: columns as a whole say which rows are empty, malformed or
have so many bytes that they could be too long. Those are read one by one, and so are rows from all over the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

from megarl.config import FileSource
from megarl.data.files import arrow_files, bounded, check_count, parts, readable
from megarl.data.prompts import CHUNK, Prompt, Renderer, Row, checked

if TYPE_CHECKING:
    import pyarrow

LARGE = 100_000  # rows, from which on a file is read so
SAMPLED = 4096  # rows from all over the file that are read before the start


def large_table(source: FileSource, key: str) -> pyarrow.Table | None:
    """The rows of a file of `LARGE` rows or more; None for a smaller one and for JSONL. Raises ConfigError where it is unreadable."""
    table = _parquet(source.path, f"{key}.path") if source.path.suffix == ".parquet" and source.path.is_file() else None
    if source.path.is_dir():
        table = _saved(source.path, f"{key}.path")
    if table is None:
        return None
    table = table.slice(source.skip, source.rows)
    return table if table.num_rows >= LARGE else None


class LargeFile(Sequence[Prompt]):
    """The prompts of a table's rows; a row that was not read before the start is checked when it is asked for.

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
        sample = np.unique(np.linspace(0, len(self) - 1, SAMPLED, dtype=np.int64))
        added = self._added(sample)
        suspects = np.flatnonzero(_suspicious(table, source, renderer.most - 2 * added))
        for first in range(0, len(checks := np.union1d(sample, suspects)), CHUNK):
            self._make(checks[first : first + CHUNK])

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Prompt]:
        for first in range(0, len(self), CHUNK):
            yield from self._make(np.arange(first, min(first + CHUNK, len(self))))

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return self._make(np.arange(len(self))[index])
        return self._make(np.array([range(len(self))[index]]))[0]  # IndexError beyond the end

    def _make(self, places: np.ndarray) -> list[Prompt]:
        return self._renderer.prompts(self._rows(places), places.tolist())

    def _rows(self, places: np.ndarray) -> list[Row]:
        rows = []
        for place in places.tolist():
            [columns] = self._table.slice(place, 1).to_pylist()  # `take` would join the chunks of a column first
            called = f"{self._key}.path: {self._source.path}:{self._source.skip + place + 1}"
            prompt, answer, meta = parts(columns, self._source, called, self._key)
            rows.append(Row(called, checked(prompt, called), answer, meta))
        return rows

    def _added(self, places: np.ndarray) -> int:
        """The most bytes that the template puts around the prompt of one of these rows."""
        rows = self._rows(places)
        return max(len(text.encode()) - _size(row) for row, text in zip(rows, self._renderer.texts(rows), strict=True))


def _parquet(path: Path, key: str) -> pyarrow.Table | None:
    from pyarrow import parquet

    size = path.stat().st_size
    # In this thread alone: the stacks and heaps of others, one a core, would count as memory.
    with readable(lambda: f"{key}: {path} is not readable as Parquet after row 0"), parquet.ParquetFile(path, pre_buffer=False) as file:
        check_count(file.metadata.num_rows, size, path, key)
        return bounded(size, lambda: file.read(use_threads=False)) if file.metadata.num_rows >= LARGE else None


def _saved(path: Path, key: str) -> pyarrow.Table:
    """Of `datasets` on disk; the rows stay there."""
    import pyarrow
    from pyarrow import ipc

    def table(part: Path) -> pyarrow.Table:
        with readable(lambda: f"{key}: {part} is not readable as Arrow after row 0"):
            return bounded(part.stat().st_size, lambda: ipc.open_stream(pyarrow.memory_map(str(part))).read_all())

    return pyarrow.concat_tables([table(part) for part in arrow_files(path, key)])


def _suspicious(table: pyarrow.Table, source: FileSource, room: int) -> np.ndarray:
    """Which rows could be refused [rows], bool: that lack something, or whose prompt has more bytes than `room`.

    No token is less than a byte of its text. Of columns whose type tells nothing every row is.
    """
    prompt, answer = _column(table, source.prompt_key), _column(table, source.answer_key)
    bad_prompts = None if prompt is None else _bad_prompts(prompt, room)
    bad_answers = None if answer is None else _bad_answers(answer)
    return np.ones(table.num_rows, dtype=bool) if bad_prompts is None or bad_answers is None else bad_prompts | bad_answers


def _column(table: pyarrow.Table, dotted: str) -> pyarrow.ChunkedArray | None:
    """The column that `files.find` reads; None where there is none, or more than one of a name."""
    import pyarrow
    from pyarrow import compute

    name, *inner = [dotted] if dotted in table.column_names else dotted.split(".")
    if table.column_names.count(name) != 1:
        return None
    column = table[name]
    for field in inner:
        if not pyarrow.types.is_struct(column.type) or column.type.get_field_index(field) < 0:
            return None
        column = compute.struct_field(column, field)
    return column


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
    fields = [message.get_field_index(name) for name in ("role", "content")]
    if any(field < 0 or not _is_text(message.field(field).type) for field in fields):
        return None
    return np.concatenate([_bad_chats(chunk, room) for chunk in column.chunks])


def _bad_chats(chats: pyarrow.ListArray, room: int) -> np.ndarray:
    from pyarrow import compute

    count = _numpy(compute.list_value_length(chats).fill_null(0))
    messages = chats.flatten()
    role, content = compute.struct_field(messages, "role"), compute.struct_field(messages, "content")
    row = np.repeat(np.arange(len(chats)), count)
    sizes = np.bincount(row, _sizes(content), minlength=len(chats))
    void = np.bincount(row, _numpy(role.is_null()) | _numpy(content.is_null()), minlength=len(chats)) > 0
    bad = (count == 0) | void | (sizes > room)
    last = (np.cumsum(count) - 1)[count > 0]
    bad[count > 0] |= _blank(content)[last] | _numpy(compute.equal(role, "assistant").fill_null(True))[last]
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
