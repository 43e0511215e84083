"""Unnamed memory shared by the processes of one machine: nothing is left behind, however they end."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:  # a process that only holds memory does not need torch, which takes two seconds to import
    from torch import Tensor

DIRECTORY = "/dev/shm"


class SharedMemory:
    """Shared memory of this machine, as bytes (`memory`) and as uint8 [capacity] (`bytes_B`).

    Other processes of the same user can open it by `path` for as long as this process holds it; its mode is 0600.

    Args:
        capacity: size in bytes.
        what: what the memory is for, named in errors.
    """

    def __init__(self, capacity: int, what: str) -> None:
        self._descriptor = descriptor = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._reserved, self._what = 0, what
        os.ftruncate(descriptor, capacity)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.memory = mmap.mmap(descriptor, capacity)

    @cached_property
    def bytes_B(self) -> Tensor:
        import torch

        return torch.frombuffer(self.memory, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Make sure that the first `nbytes` can be written. Raises OSError if there is no room; a later write would die of SIGBUS."""
        if nbytes > self._reserved:
            try:
                os.posix_fallocate(self._descriptor, self._reserved, nbytes - self._reserved)
            except OSError as error:
                raise OSError(error.errno, f"{self._what}: {DIRECTORY} has no room for {nbytes} bytes") from error
            self._reserved = nbytes

    def close(self) -> None:
        """Close the descriptor; `memory` and views of `bytes_B` stay valid. Can be called twice."""
        self._close()


class MemoryFile:
    """An unnamed file in this machine's memory, with a path that works in this process only and as long as this object lives.

    Args:
        write: writes the content. OSError is raised if there is no room.
    """

    def __init__(self, write: Callable[[BinaryIO], None]) -> None:
        descriptor = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, descriptor)
        self._path = f"/proc/self/fd/{descriptor}"
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            write(file)

    def __fspath__(self) -> str:
        return self._path


def mapped(path: str, size: int) -> Tensor:
    """Map the first `size` bytes of another process's shared memory at `path` as uint8 [size], without a copy. Changes stay private.

    Raises ValueError if there are fewer bytes.
    """
    import torch

    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if (nbytes := os.fstat(descriptor).st_size) < size:
            raise ValueError(f"shared memory {path} has {nbytes} bytes, and {size} are announced")
        return torch.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(descriptor)
