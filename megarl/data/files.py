"""Read rows of .jsonl and .parquet files, and of directories written by `datasets`, in the column layout of DAPO and verl.

    {"prompt": [{"role": "user", "content": "17 + 17?"}], "reward_model": {"ground_truth": "34"}, "data_source": ..., "extra_info": ...}

`prompt` may also be a string, and `ground_truth` any JSON value: a number, a list of acceptable answers, an object (see answers.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, FileSource
from megarl.config.data import TableSource
from megarl.data.answers import Answer, checked_answer
from megarl.data.bounds import in_memory
from megarl.data.columns import at, chosen_rows
from megarl.data.exact import exact_row, exact_rows
from megarl.data.tokenizer import first_line
from megarl.errors import Absent
from megarl.text.strict_json import MAX_LINE, lines_of, parse_json, read_json

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

BATCH = 4096  # Parquet rows in memory at a time
MAX_ROWS = 1_000_000  # maximum number of Parquet rows if they take less than a byte each
ROOM_MB, SWELLING = 384, 32  # memory for a batch of Parquet or Arrow: a fixed part, plus this many times the file's size


def read_file(source: FileSource, key: str) -> Iterator[tuple[str, Any, Answer, dict[str, Any]]]:
    """Yield (place for messages, unchanged prompt, answer, other columns) of every row, streaming the file.

    Raises ConfigError with the dotted key, the file and the line (Parquet: the row), both counted from 1.
    """
    for place, row in taken_rows(source, key):
        yield place, *parts(row, source, place, key)


def refused(error: ConfigError) -> None:
    """Raise the error of a row that cannot be read."""
    raise error


def taken_rows(source: TableSource, key: str, refuse: Callable[[ConfigError], None] = refused) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place for messages, columns) of the rows that `skip`, `rows` and `where` select.

    Args:
        source: the file.
        key: the source's dotted key, such as "data.train".
        refuse: is given the error of each selected line that is no row, which then is left out.

    Raises:
        ConfigError: as `read_file` does, and whatever `refuse` raises.
    """
    last = None if source.rows is None else source.skip + source.rows
    answer = source.answer_key if isinstance(source, FileSource) else ""
    rows = islice(each_row(source.path, key, answer), source.skip, last)
    return chosen_rows(_readable_rows(rows, refuse), source.where, source.path, key)


def parts(row: dict[str, Any], source: FileSource, place: str, key: str) -> tuple[Any, Answer, dict[str, Any]]:
    """Split a row into its prompt, its answer and its other columns.

    Args:
        row: the row's columns.
        source: names the columns of prompt and answer.
        place: the row's name in messages.
        key: the source's dotted key, such as "data.train".

    Returns:
        The unchanged prompt, the answer, and the other columns.

    Raises:
        ConfigError: prompt or answer is missing or malformed; the message starts with `place`.
    """
    prompt = at(row, source.prompt_key, place, f"{key}.prompt_key")
    answer = checked_answer(at(row, source.answer_key, place, f"{key}.answer_key"), place, source.answer_key)
    used = {source.prompt_key, source.prompt_key.partition(".")[0], source.answer_key, source.answer_key.partition(".")[0]}
    return prompt, answer, {name: value for name, value in row.items() if name not in used}


def read_rows(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place for messages, columns) of every row of a file, streaming it. Raise ConfigError as `read_file` does."""
    return _readable_rows(each_row(path, key), refused)


def each_row(path: Path, key: str, answer: str = "") -> Iterator[tuple[str, dict[str, Any] | ConfigError]]:
    """Yield (place for messages, columns) of every row of a file; instead of the columns of a line that is no row, the error.

    Args:
        path: the file.
        key: the source's dotted key.
        answer: the column of the answers, whose numbers keep all their digits.

    Raises:
        ConfigError: the file as a whole cannot be read.
    """
    try:
        for number, row in _reader(path, key)(path, f"{key}.path", answer):
            yield f"{key}.path: {path}:{number}", row
    except OSError as error:
        raise ConfigError(f"{key}.path: {error.filename or path}: {error.strerror}") from None


def _readable_rows(
    rows: Iterable[tuple[str, dict[str, Any] | ConfigError]], refuse: Callable[[ConfigError], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, row in rows:
        if isinstance(row, ConfigError):
            refuse(row)
        else:
            yield place, row


Rows = Iterator[tuple[int, dict[str, Any] | ConfigError]]


def _reader(path: Path, key: str) -> Callable[[Path, str, str], Rows]:
    readers: dict[str, Callable[[Path, str, str], Rows]] = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.is_dir():
        return _saved
    if not path.is_file():
        raise Absent(f"{key}.path: no such file: {path}")
    if path.suffix not in readers:
        raise ConfigError(f"{key}.path: {path} must end in .jsonl or .parquet")
    return readers[path.suffix]


def _jsonl(path: Path, key: str, answer: str) -> Rows:
    last = 0  # empty lines at the end are no rows
    for number, (place, line) in enumerate(lines_of(path, f"{key}: {path}"), 1):
        if not line.strip():
            continue
        for empty in range(last + 1, number):
            yield empty, ConfigError(f"{key}: {path}:{empty}: empty line")
        last = number
        try:
            yield number, _row_of(line, place, answer)
        except ConfigError as error:
            yield number, error


def _row_of(line: bytes, place: str, answer: str) -> dict[str, Any]:
    """Return the row of a line. Raise ConfigError if it is none."""
    try:
        row = parse_json(line.rstrip())
    except json.JSONDecodeError as error:
        part = "; each line must hold one whole object" if line.strip() in (b"[", b"{") else ""
        raise ConfigError(f"{place}: not JSON: {error.msg} at column {error.colno}{part}") from None
    except ValueError as error:  # a key twice, or not UTF-8
        raise ConfigError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: must hold an object, not {type(row).__name__}")
    return exact_row(row, line, answer)


def _parquet(path: Path, key: str, answer: str) -> Rows:
    number, size = 0, path.stat().st_size
    with open_parquet(path, key, lambda: number) as file:
        for batch in parquet_batches(file, BATCH, size):
            for row in bounded(size, partial(exact_rows, batch, answer)):
                number += 1
                yield number, row


def _saved(path: Path, key: str, answer: str) -> Rows:
    last = 0
    for part in arrow_files(path, key):
        for number, row in _stream(part, key, last, answer):
            last = number
            yield number, row


def _stream(path: Path, key: str, number: int, answer: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of an Arrow stream with their numbers, which continue from `number`; `answer`: the column of the answers."""
    import pyarrow
    from pyarrow import ipc

    size = path.stat().st_size
    trouble = readable(lambda: f"{key}: {path} is not readable as Arrow after row {number}")
    with trouble, pyarrow.memory_map(str(path)) as file, ipc.open_stream(file) as stream:
        for batch in _bounded_each(iter(stream), size):
            for first in range(0, batch.num_rows, BATCH):
                for row in bounded(size, partial(exact_rows, batch.slice(first, BATCH), answer)):
                    number += 1
                    yield number, row


def arrow_files(path: Path, key: str) -> list[Path]:
    """Return the Arrow files written by Hugging Face's `Dataset.save_to_disk`, in the order of state.json. Raise ConfigError if damaged."""
    if (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(split.name for split in path.iterdir() if (split / "state.json").is_file()))
        raise ConfigError(f"{key}: {path} holds several splits ({splits}): name one, such as {path}/train")
    try:
        state = read_json(path / "state.json", MAX_LINE)
        names = [str(file["filename"]) for file in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise ConfigError(f"{key}: {path} was saved with an index mapping; call flatten_indices() before save_to_disk")
        if any(Path(name).name != name for name in names):
            raise ValueError("it names a file elsewhere")
        if missing := [name for name in names if not (path / name).is_file()]:
            raise ValueError(f"it names {missing[0]}, which is not a file in the directory")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{key}: {path} is not a directory of `datasets` (save_to_disk): state.json: {first_line(error)}") from None
    return [path / name for name in names]


@contextmanager
def open_parquet(path: Path, key: str, rows_read: Callable[[], int]) -> Iterator[ParquetFile]:
    """Open a Parquet file within the block.

    Args:
        path: the file's path.
        key: the path's dotted key.
        rows_read: returns how many of its rows the block has read so far.

    Raises:
        ConfigError: the block cannot read the file, or the file claims far more rows than its bytes could hold.
    """
    from pyarrow import parquet

    size = path.stat().st_size
    trouble = readable(lambda: f"{key}: {path} is not readable as Parquet after row {rows_read()}")
    with trouble, parquet.ParquetFile(path, pre_buffer=False) as file:
        if (rows := file.metadata.num_rows) > max(MAX_ROWS, size):
            raise ConfigError(f"{key}: {path} says that it has {rows:,} rows in {size:,} bytes")
        yield file


def parquet_batches(file: ParquetFile, rows: int, size: int) -> Iterator[RecordBatch]:
    """Read a file batch by batch.

    Args:
        file: the open file.
        rows: maximum number of rows in a batch.
        size: the file's size in bytes.

    Raises:
        MemoryError: a batch expands far beyond the file's size.
    """
    # Only in this thread: the stacks and heaps of other threads, one per core, would count towards the memory limit.
    return _bounded_each(file.iter_batches(batch_size=rows, use_threads=False), size)


def _bounded_each(batches: Iterator[RecordBatch], size: int) -> Iterator[RecordBatch]:
    while (batch := bounded(size, partial(next, batches, None))) is not None:
        yield batch


@contextmanager
def readable(trouble: Callable[[], str]) -> Iterator[None]:
    """Raise ConfigError, starting with `trouble`, if the block fails to read a Parquet or Arrow file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise ConfigError(f"{trouble()}: {first_line(error)}") from None


def bounded(size: int, read: Callable[[], Any]) -> Any:
    """Return the result of `read` for a batch. Raise MemoryError if it expands far beyond the `size` of its file."""
    room_mb = ROOM_MB + SWELLING * size / (1 << 20)
    try:
        with in_memory(room_mb):
            return read()
    except MemoryError:
        limit = f"{room_mb:,.0f} MB, which are {ROOM_MB} MB and {SWELLING} times the file"
        raise MemoryError(f"a batch of rows would allocate more than {limit}: write it with smaller row groups, or as JSONL") from None
