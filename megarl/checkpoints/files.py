"""Files that are hashed while they are written, and lie on the disk when they are closed."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

_CHUNK = 4 << 20  # bytes read at a time


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    size: int  # bytes
    sha256: str  # hexadecimal


class HashedFile:
    """A new file, written from its beginning to its end. `close` syncs it to the disk and says what was written.

    A failing write raises from `check` and `close` only: torch.save calls `write` out of C++, where an exception would lose its cause.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file, self._hash = path.open("xb"), hashlib.sha256()
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Takes all of `data`."""
        size = memoryview(data).nbytes
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
            self._hash.update(data)
        self.size += size
        return size

    def flush(self) -> None:
        """Nothing: the file is flushed when it is closed."""

    def check(self) -> None:
        """Raises OSError, with the file's name, where a write has failed."""
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.path))

    def close(self) -> FileRecord:
        """Ends the file. Raises OSError where it is not whole on the disk."""
        try:
            self.check()
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        finally:
            self.discard()
        return FileRecord(self.size, self._hash.hexdigest())

    def discard(self) -> None:
        """Lets go of the file, whole or not."""
        try:
            self._file.close()
        except OSError as error:  # what is buffered does not fit
            self._error = self._error or error

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.discard()


class LargeContent(Protocol):
    """Content of a file that is too large to be in memory at once."""

    def write(self, file: HashedFile | BinaryIO, /) -> None:
        """Writes all of it into a file that need not be seekable."""


Content = bytes | LargeContent
"""Of a file."""


def write_file(path: Path, data: Content) -> FileRecord:
    """Writes a new file. Raises OSError where it is not whole on the disk."""
    with HashedFile(path) as file:
        if isinstance(data, bytes):
            file.write(data)
        else:
            data.write(file)
        return file.close()


def read_record(path: Path) -> FileRecord:
    """The record of a file as it is now."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
            size += len(data)
    return FileRecord(size, digest.hexdigest())


def sync(path: Path) -> None:
    """Makes a file's content, or the names in a directory, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
