"""Files that are hashed while they are written and synced to disk when they are closed, and files that are read past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

from xxhash import xxh3_128

_COLLECTED = 16 << 20  # bytes written at a time; a multiple of every device's block size
_CACHED = 1 << 20  # the same for writes to the page cache
_CHUNK = 4 << 20  # bytes read at a time
_BLOCK = 4096  # bytes; block size of a disk


@dataclass(frozen=True)
class FileRecord:
    """The size and hash of a file as it was written."""

    size: int  # bytes
    xxh128: str  # hexadecimal, as `xxhsum -H2` prints it


class HashedFile:
    """A new file that is written sequentially. `close` syncs it to disk and returns its record.

    A file of more than 16 MiB bypasses the page cache if the file system supports that (O_DIRECT): this saves a copy by the CPU, leaves in
    the cache what the training keeps there, and leaves next to nothing for `close` to sync.

    Args:
        path: the file's path.
        cached: write through the page cache even so, since the file will be read on this machine.

    A failed write raises only from `check` and `close`, since torch.save calls `write` from C++, where an exception would lose its cause.
    """

    def __init__(self, path: Path, cached: bool = False) -> None:
        self.path, self.size, self._cached = path, 0, cached
        self._file, self._hash = path.open("xb", buffering=0), xxh3_128()
        self._part, self._part_hash = 0, xxh3_128()  # where the current part begins
        self._room = _CACHED if cached else _COLLECTED
        self._collected, self._filled = mmap.mmap(-1, self._room), 0  # O_DIRECT requires page-aligned memory
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append all of `data`."""
        left = memoryview(data).cast("B")
        size = len(left)
        self._hash.update(left)
        self._part_hash.update(left)
        self.size += size
        while left and self._error is None:
            taken = left[: self._room - self._filled]
            self._collected[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            left = left[len(taken) :]
            if self._filled == self._room:
                self._attempt(self._write_collected, direct=not self._cached)
        return size

    def end_part(self) -> tuple[int, int, str]:
        """Return the offset, length and hash of what has been written since the last call."""
        offset, found = self._part, self._part_hash.hexdigest()
        self._part = self.size
        self._part_hash.reset()
        return offset, self.size - offset, found

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

    def _write_collected(self, direct: bool) -> None:
        """Write the collected bytes. `direct` must be false for the end of a file, which need not end on a block boundary."""
        descriptor = self._file.fileno()
        direct = _set_direct(descriptor, direct)
        with memoryview(self._collected)[: self._filled] as data:
            self._filled, written = 0, 0
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
    """A file that is read by one thread. Raises OSError, with the file's name, if it cannot be read.

    Data that is not in the page cache is read past it if the file system supports that, since filling the cache with data that is read
    only once costs ten times as much as the copy.

    Args:
        path: the file's path.
        in_order: the parts are read sequentially, so more than the requested part may be read at a time.
    """

    def __init__(self, path: Path, in_order: bool = False) -> None:
        self.path, self._in_order = path, in_order
        self._plain, self._direct = os.open(path, os.O_RDONLY), -1
        os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: later parts are read directly
        with suppress(OSError):
            self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._buffer = mmap.mmap(-1, _CHUNK)  # O_DIRECT requires page-aligned memory
        self._start = self._held = 0  # file offset and number of the bytes in the buffer

    def blocks(self) -> Iterator[memoryview]:
        """Yield the whole file in consecutive blocks; each is valid only until the next is requested."""
        start = 0
        while True:
            self._fill(start, _CHUNK)
            end = self._start + self._held
            if end <= start:
                return
            with memoryview(self._buffer)[start - self._start : self._held] as data:
                yield data
            start = end

    def read_part(self, start: int, target: memoryview) -> int:
        """Read from `start` into the target with one system call; return the number of bytes, 0 at the end. For small, scattered parts."""
        try:
            return os.preadv(self._plain, [target], start)
        except OSError as error:
            raise self._named(error) from None

    def read(self, start: int, target: memoryview) -> None:
        """Fill the target from `start`. Raise OSError if the file ends too early."""
        while target:
            if not self._start <= start < self._start + self._held:
                if count := self._from_cache(start, target):
                    start, target = start + count, target[count:]
                    continue
                self._fill(start, _CHUNK if self._in_order else len(target))
            skipped = start - self._start
            count = min(self._held - skipped, len(target))
            if count <= 0:
                raise OSError(errno.EIO, f"ends {len(target)} bytes too early", str(self.path))
            with memoryview(self._buffer)[skipped : skipped + count] as data:
                target[:count] = data
            start, target = start + count, target[count:]

    def close(self) -> None:
        """Close the file."""
        for descriptor in (self._plain, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._plain = self._direct = -1
        self._buffer.close()

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fill(self, start: int, wanted: int) -> None:
        """Read `wanted` bytes from `start` (at most what the buffer holds), extended to whole disk blocks."""
        self._start = start // _BLOCK * _BLOCK
        size = -(-(start - self._start + wanted) // _BLOCK) * _BLOCK
        with memoryview(self._buffer)[:size] as buffer:
            self._held = self._from_cache(self._start, buffer)
            if self._start + self._held > start:
                return
            if self._direct >= 0:
                try:
                    self._held = os.preadv(self._direct, [buffer], self._start)
                    return
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise self._named(error) from None
                    os.close(self._direct)  # the disk's blocks are larger, or O_DIRECT does not work after all
                    self._direct = -1
            self._held = self.read_part(self._start, buffer)

    def _from_cache(self, start: int, target: memoryview) -> int:
        """Read only what is already in the page cache; return the number of bytes, 0 if there are none or at the end of the file."""
        try:
            return os.preadv(self._plain, [target], start, os.RWF_NOWAIT)
        except OSError:  # any other error will recur in the ordinary read
            return 0

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))


def sync(path: Path) -> None:
    """Sync a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
