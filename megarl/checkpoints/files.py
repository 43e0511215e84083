"""Files that are hashed while they are written, and synced to disk when they are closed; files that are read in parts."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from xxhash import xxh3_128

_COLLECTED = 16 << 20  # bytes written at a time; a multiple of every device's block size
_CACHED = 1 << 20  # the same for writes to the page cache
_CHUNK = 4 << 20  # bytes read at a time


@dataclass(frozen=True)
class FileRecord:
    """The size and hash of a file as it was written."""

    size: int  # bytes
    xxh128: str  # hexadecimal, as `xxhsum -H2` prints it


class HashedFile:
    """A new file that is written sequentially. `close` syncs it to disk and returns its record.

    A failed write raises only from `check` and `close`, since torch.save calls `write` from C++, where an exception would lose its cause.

    Args:
        path: the file's path.
        direct: bypass the page cache if the file system supports that (O_DIRECT). This takes less CPU time from a training that runs
            alongside, and leaves its pages in the cache, but some disks are slower at it.
    """

    def __init__(self, path: Path, direct: bool = False) -> None:
        self.path, self.size, self._direct = path, 0, direct
        self._file, self._hash = path.open("xb", buffering=0), xxh3_128()
        self._part, self._part_hash = 0, xxh3_128()  # where the current part begins
        self._collected = mmap.mmap(-1, _COLLECTED if direct else _CACHED)  # O_DIRECT requires page-aligned memory
        self._filled = self._hashed = 0  # bytes in it, and how many of them are hashed
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append all of `data`."""
        data = memoryview(data).cast("B")
        size = len(data)
        self.size += size
        if size < len(self._collected) - self._filled:  # torch.save writes dozens of small pieces for each tensor
            self._collected[self._filled : self._filled + size] = data
            self._filled += size
        elif self._error is None:
            self._attempt(self._append, data)
        return size

    def end_part(self) -> tuple[int, int, str]:
        """Return the offset, length and hash of what has been written since the last call."""
        self._hash_collected()
        offset, digest = self._part, self._part_hash.hexdigest()
        self._part = self.size
        self._part_hash.reset()
        return offset, self.size - offset, digest

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is closed."""

    def check(self) -> None:
        """Raise OSError, with the file's name, if a write has failed."""
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self.path))

    def close(self) -> FileRecord:
        """Finish and sync the file; return its record. Raise OSError if it is not completely on disk."""
        try:
            self.check()
            self._attempt(self._write_collected, direct=False)
            self.check()
            self._attempt(os.fsync, self._file.fileno())
            self.check()
        finally:
            self.discard()
        return FileRecord(self.size, self._hash.hexdigest())

    def discard(self) -> None:
        """Close the file, complete or not."""
        self._attempt(self._file.close)
        self._collected.close()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.discard()

    def _attempt(self, call: Callable[..., object], *arguments: object, **named: object) -> None:
        try:
            call(*arguments, **named)
        except OSError as error:
            self._error = self._error or error

    def _append(self, left: memoryview) -> None:
        room = len(self._collected)
        if not self._direct and len(left) >= room:
            self._write_collected(direct=False)
            self._update(left)
            self._write(left, direct=False)
            return
        while left:
            taken = left[: room - self._filled]
            self._collected[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            left = left[len(taken) :]
            if self._filled == room:
                self._write_collected(self._direct)

    def _write_collected(self, direct: bool) -> None:
        """Write the collected bytes. `direct` must be false for the end of a file, which need not end on a block boundary."""
        self._hash_collected()
        with memoryview(self._collected)[: self._filled] as data:
            self._filled = self._hashed = 0
            self._write(data, direct)

    def _hash_collected(self) -> None:
        with memoryview(self._collected)[self._hashed : self._filled] as data:
            self._update(data)
            self._hashed = self._filled

    def _update(self, data: memoryview) -> None:
        self._hash.update(data)
        self._part_hash.update(data)

    def _write(self, data: memoryview, direct: bool) -> None:
        descriptor = self._file.fileno()
        direct, written = self._direct and _set_direct(descriptor, direct), 0
        while written < len(data):
            try:
                written += os.write(descriptor, data[written:])
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                direct = _set_direct(descriptor, False)  # a partial write has ended within a block


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Turn O_DIRECT on or off. Return whether it is now on, since not every file system supports it."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return wanted


class LargeContent(Protocol):
    """The content of a file that is too large to hold in memory at once."""

    def write(self, file: HashedFile | BinaryIO, /) -> None:
        """Write all of it to a file, which need not be seekable."""


Content = bytes | LargeContent
"""The content of a file."""


def write_file(path: Path, data: Content) -> FileRecord:
    """Write and sync a new file; return its record. Raise OSError if it is not completely on disk."""
    with HashedFile(path) as file:
        if isinstance(data, bytes):
            file.write(data)
        else:
            data.write(file)
        return file.close()


def read_record(path: Path) -> FileRecord:
    """Return the record of a file as it is now."""
    digest, size = xxh3_128(), 0
    with StoredFile(path) as file:
        for data in file.blocks():
            digest.update(data)
            size += len(data)
    return FileRecord(size, digest.hexdigest())


class StoredFile:
    """A file that is read by one thread. Raises OSError, with the file's name, if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, os.open(path, os.O_RDONLY)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # doubles the read-ahead

    def blocks(self) -> Iterator[memoryview]:
        """Yield the whole file in consecutive blocks; each is valid only until the next is requested."""
        start, buffer = 0, memoryview(bytearray(_CHUNK))
        while count := self.read_part(start, buffer):
            yield buffer[:count]
            start += count

    def read_part(self, start: int, target: memoryview) -> int:
        """Read from `start` into the target with one system call; return the number of bytes, 0 at the end."""
        try:
            return os.preadv(self._descriptor, [target], start)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def read(self, start: int, target: memoryview) -> None:
        """Fill the target from `start`. Raise OSError if the file ends too early."""
        while target:
            count = self.read_part(start, target)
            if count == 0:
                raise OSError(errno.EIO, f"ends {len(target)} bytes too early", str(self.path))
            start, target = start + count, target[count:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def sync(path: Path) -> None:
    """Sync a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
