"""Files that are hashed while they are written, and lie on the disk when they are closed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol

_COLLECTED = 16 << 20  # bytes written at a time, a multiple of every device's block
_CACHED = 1 << 20  # the same where they go into the page cache
_CHUNK = 4 << 20  # bytes read at a time
_BLOCK = 4096  # of a disk


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    size: int  # bytes
    sha256: str  # hexadecimal


class HashedFile:
    """A new file, written from its beginning to its end. `close` syncs it to the disk and says what was written.

    A file of more than 16 MiB goes past the page cache where the file system can do that (O_DIRECT): no processor copies it once more, what
    the training has cached stays there, and `close` finds next to nothing to sync.

    Args:
        path: of the file.
        cached: it goes into the page cache all the same, since it will be read on this machine.

    A failing write raises from `check` and `close` only: torch.save calls `write` out of C++, where an exception would lose its cause.
    """

    def __init__(self, path: Path, cached: bool = False) -> None:
        self.path, self.size, self._cached = path, 0, cached
        self._file, self._hash = path.open("xb", buffering=0), hashlib.sha256()
        self._room = _CACHED if cached else _COLLECTED
        self._collected, self._filled = mmap.mmap(-1, self._room), 0  # O_DIRECT asks for memory that begins with a page
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Takes all of `data`."""
        left = memoryview(data).cast("B")
        size = len(left)
        self._hash.update(left)
        self.size += size
        while left and self._error is None:
            taken = left[: self._room - self._filled]
            self._collected[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            left = left[len(taken) :]
            if self._filled == self._room:
                self._attempt(self._write_collected, direct=not self._cached)
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
            self._attempt(self._write_collected, direct=False)
            self.check()
            self._attempt(os.fsync, self._file.fileno())
            self.check()
        finally:
            self.discard()
        return FileRecord(self.size, self._hash.hexdigest())

    def discard(self) -> None:
        """Lets go of the file, whole or not."""
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
        """Writes what is collected. Not directly: the rest of a file, which need not end with a block."""
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
                    direct = _set_direct(descriptor, False)  # after a write in part, which ended within a block


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Lets writes pass the page cache, or not. Whether they do: not every file system can."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return wanted


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
    with StoredFile(path) as file:
        for data in file.blocks():
            digest.update(data)
            size += len(data)
    return FileRecord(size, digest.hexdigest())


class StoredFile:
    """A file that is read by one thread. Raises OSError, with its name, where it cannot be.

    What is not in the page cache is read past it where the file system can do that: filling it with what is read once costs ten times the
    copy.

    Args:
        path: of the file.
        in_order: the parts that are read lie one after the other, so that more than the one which is asked for may be read at a time.
    """

    def __init__(self, path: Path, in_order: bool = False) -> None:
        self.path, self._in_order = path, in_order
        self._plain, self._direct = os.open(path, os.O_RDONLY), -1
        os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_RANDOM)  # what lies behind a part is read directly
        with suppress(OSError):
            self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._buffer = mmap.mmap(-1, _CHUNK)  # O_DIRECT asks for memory that begins with a page
        self._start = self._held = 0  # what the buffer holds

    def blocks(self) -> Iterator[memoryview]:
        """All of it, in order; each block is valid until the next is asked for."""
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
        """Reads from a place into the target what one call gives; 0 at the end of the file. For what is small and lies here and there."""
        try:
            return os.preadv(self._plain, [target], start)
        except OSError as error:
            raise self._named(error) from None

    def read(self, start: int, target: memoryview) -> None:
        """Fills the target from a place."""
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
        """Lets go of the file."""
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
        """Reads so much from a place, or as much as the buffer holds, with the rest of the disk's blocks that it lies in."""
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
                    os.close(self._direct)  # its blocks are larger, or it cannot do this after all
                    self._direct = -1
            self._held = self.read_part(self._start, buffer)

    def _from_cache(self, start: int, target: memoryview) -> int:
        """Reads what is in the page cache already; 0 where nothing is, or at the end of the file."""
        try:
            return os.preadv(self._plain, [target], start, os.RWF_NOWAIT)
        except OSError:  # whatever else is wrong will be so again
            return 0

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))


def sync(path: Path) -> None:
    """Makes a file's content, or the names in a directory, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
