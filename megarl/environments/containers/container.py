"""The interface of containers, which run what a model writes, and the bounded reading of a program's output.

This module is imported in the sandbox, so it imports neither torch nor the configuration.
"""

import os
import select
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

TICK_S = 0.05  # between two looks at a running command
CHUNK = 1 << 16
CUT = b"\n... (%d bytes left out)\n"


class ContainerGone(Exception):
    """A container has died, or does not answer; the message is the reason. It is of no more use, and has to be stopped."""


class Unusable(ValueError):
    """A task cannot be run in such a container; the message is the reason."""


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int  # its exit status; negative: the signal that ended it
    output: bytes  # what it wrote on both streams, at most as many bytes as were asked for, and a mark where others are left out
    ended: str | None = None  # why it was ended, such as "not done after 10 s"; None if it ended by itself


class Container(Protocol):
    """A machine of its own for one episode, used by one thread at a time. Every method ends in bounded time, or raises ContainerGone."""

    home: str
    """The directory in which tasks without a place of their own are laid."""

    def start(self) -> None:
        """Start it; must be called first, once."""
        ...

    def exec(self, command: str, directory: str, within_s: float, most: int) -> Ran:
        """Run a shell command, and end it and whatever it has started.

        Args:
            command: the command.
            directory: where it runs.
            within_s: its time limit.
            most: how many bytes of its output are kept.
        """
        ...

    def upload(self, path: str, data: bytes) -> None:
        """Write a file, and the directories that lead to it. Raises OSError if it cannot be written."""
        ...

    def download(self, path: str, most: int) -> bytes:
        """Return a file. Raises OSError if it cannot be read, or is larger than `most`."""
        ...

    def stop(self) -> None:
        """End everything in it, and remove it. Can be called twice, and from another thread."""


class Kept:
    """The beginning and the end of an output.

    Args:
        most: how many bytes are kept.
    """

    def __init__(self, most: int) -> None:
        self._head_size, self._tail_size = most - most // 2, most // 2
        self._head, self._tail, self.size = bytearray(), bytearray(), 0

    def write(self, data: bytes) -> None:
        """Add to the output."""
        self.size += len(data)
        room = self._head_size - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(0, len(self._tail) - self._tail_size)]

    def value(self) -> bytes:
        """Return what is kept, with a mark where something is left out."""
        left_out = self.size - len(self._head) - len(self._tail)
        return bytes(self._head) + (CUT % left_out if left_out else b"") + bytes(self._tail)


def collected(process: subprocess.Popen[bytes], within_s: float, most: int, end: Callable[[], None]) -> Ran:
    """Read the output of a process until it ends or its time is over.

    What it has left in the background does not hold this up: the output is read until the process itself has ended.

    Args:
        process: the process, whose output is a pipe.
        within_s: its time limit.
        most: how many bytes are kept.
        end: ends the process, and whatever belongs to it; called in any case.
    """
    assert process.stdout is not None
    descriptor, kept, deadline, why = process.stdout.fileno(), Kept(most), time.monotonic() + within_s, None
    os.set_blocking(descriptor, False)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    open_ = True
    while process.poll() is None:
        left = deadline - time.monotonic()
        if left <= 0:
            why = f"not done after {within_s:g} s"
            break
        if not open_:
            time.sleep(min(TICK_S, left))
        elif poll.poll(1000 * min(TICK_S, left)):
            open_ = _read(descriptor, kept, 1)
    end()
    code = process.wait()
    _read(descriptor, kept, 64)  # what is in the pipe, whose other end something in the background may still hold
    process.stdout.close()
    return Ran(code, kept.value(), why)


def _read(descriptor: int, kept: Kept, times: int) -> bool:
    """Read what has arrived. Return whether more may come."""
    for _ in range(times):
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        kept.write(data)
    return True
