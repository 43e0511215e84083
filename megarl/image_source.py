"""Where the bytes of an image are: in a file of its own, in a row of a data file, or, of a request to a server, with the reference.

An image travels as a reference, which has the SHA-256 of its bytes. Whoever computes with it reads them here: they are those that were
checked when the image was drawn, or the run stops.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from megarl.errors import Stopped
from megarl.text.strict_json import MAX_LINE, lines_of, parse_json, read_json

IMAGES = "images"  # folder of a run's directory with what environments have shown
MOST_BYTES = 64 << 20  # of an image's file
CACHED_BYTES = 1 << 28  # of images that a process keeps
BATCH = 16  # Parquet rows that are decoded together: they may hold megabytes each


class BadImage(ValueError):
    """A file that is no image, or none that is taken; the message says why, without its name."""


class ImageGone(Stopped):
    """The bytes of an image are no longer where they were when it was drawn, or are others."""


@dataclass(frozen=True)
class ImageSource:
    """Where an image's bytes are."""

    path: str  # of the image's file, or of a file or directory of rows
    row: int = 0  # counted from 1; 0: the file is the image
    data: bytes | None = field(default=None, repr=False)  # the bytes themselves, which no file has

    def read(self, digest: str) -> bytes:
        """Return the bytes of a SHA-256. Raise ImageGone if they are not there."""
        if self.data is not None:
            return self.data
        if (data := _cache.get(digest)) is not None:
            return data
        where = f"{self.path}:{self.row}" if self.row else self.path
        try:
            contents = _inside(_row(self.path, self.row)) if self.row else iter([read_bounded(Path(self.path))])
            data = next((one for one in contents if hashlib.sha256(one).hexdigest() == digest), None)
        except Exception as error:  # of files that others have changed: whatever their readers raise
            raise ImageGone(f"image {digest[:12]}: {where} cannot be read: {str(error).partition(chr(10))[0]}") from None
        if data is None:
            raise ImageGone(f"image {digest[:12]}: {where} has changed since the image was drawn")
        _cache.put(digest, data)
        return data


def read_bounded(path: Path) -> bytes:
    """Return the bytes of an image's file. Raise BadImage if it is absent, no plain file, or too large."""
    try:
        if not path.is_file():
            raise BadImage(f"no such file: {path}")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise BadImage(f"{path} has {size} bytes, more than {MOST_BYTES}")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise error if isinstance(error, BadImage) else BadImage(f"{path}: {error}") from None


def held(value: Any) -> bytes | None:
    """Return the bytes that a value of a row holds itself, as bytes or as a data URL; None: it holds none.

    Raises:
        BadImage: a data URL that is not base64, or too many bytes.
    """
    if isinstance(value, str) and value.startswith("data:"):
        head, _, body = value.partition(",")
        if not head.endswith(";base64") or len(body) > 2 * MOST_BYTES:
            raise BadImage(f"a data URL of at most {MOST_BYTES} bytes in base64 is taken, not {value!r:.40}")
        try:
            value = base64.b64decode(body, validate=True)
        except ValueError as error:  # also of what is not ASCII
            raise BadImage(f"not base64: {error}") from None
    if isinstance(value, bytes) and len(value) > MOST_BYTES:
        raise BadImage(f"{len(value)} bytes, more than {MOST_BYTES}")
    return value if isinstance(value, bytes) else None


def kept_file(data: bytes, folder: Path) -> ImageSource:
    """Write an image that no data file holds into a folder, once, under its SHA-256; return where it is."""
    path = folder / hashlib.sha256(data).hexdigest()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)  # a checkpoint may refer to it, and outlive the machine
        os.replace(name, path)
    return ImageSource(str(path))


class _Cache:
    """Bytes by their SHA-256: the last that were read, up to `CACHED_BYTES`."""

    def __init__(self) -> None:
        self._kept, self._size, self._lock = OrderedDict[str, bytes](), 0, Lock()

    def get(self, digest: str) -> bytes | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def put(self, digest: str, data: bytes) -> None:
        with self._lock:
            if digest not in self._kept:
                self._kept[digest], self._size = data, self._size + len(data)
            while self._size > CACHED_BYTES:
                self._size -= len(self._kept.popitem(last=False)[1])


_cache = _Cache()


def _inside(value: Any) -> Iterator[bytes]:
    """Yield the bytes of every image that a row holds itself."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _inside(inner)
    elif (data := held(value)) is not None:
        yield data


def _row(path: str, number: int) -> Any:
    """Return a row of a JSONL or Parquet file, or of a directory of `datasets`. Raise whatever their readers do, IndexError without it."""
    if path.endswith(".jsonl"):
        start = _line_starts(path, os.stat(path).st_mtime_ns)[number - 1]
        return parse_json(next(lines_of(Path(path), path, start))[1].rstrip())
    batches = _parquet(path, number - 1) if path.endswith(".parquet") else _saved(Path(path), number - 1)
    return next(batches)


@lru_cache(maxsize=8)
def _line_starts(path: str, changed: int) -> array[int]:
    """Return the byte at which each line of a file starts, 8 bytes a line. `changed`: when the file was."""
    starts, place = array("Q"), 0
    for _, line in lines_of(Path(path), path):
        starts.append(place)
        place += len(line)
    return starts


def _parquet(path: str, index: int) -> Iterator[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:  # page by page, not whole columns
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if index < rows:
                batches = file.iter_batches(batch_size=BATCH, row_groups=[group], use_threads=False)
                batch = next(islice(batches, index // BATCH, None))
                yield batch.slice(index % BATCH, 1).to_pylist()[0]
            index -= rows
    raise IndexError("it has no such row")


def _saved(path: Path, index: int) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc

    for part in read_json(path / "state.json", MAX_LINE)["_data_files"]:
        with pyarrow.memory_map(str(path / Path(part["filename"]).name)) as file, ipc.open_stream(file) as stream:
            for batch in stream:
                if index < batch.num_rows:
                    yield batch.slice(index, 1).to_pylist()[0]
                index -= batch.num_rows
    raise IndexError("it has no such row")
