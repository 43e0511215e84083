"""Bounds on what a file can make a check do: a model's chat template, the parameters of a data set, a compressed table.

They hold in the main thread, where checks are made before anything starts; in another one, as in a service, nothing is bounded.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

AGAIN_S = 1.0  # code that catches everything is interrupted as often as it takes


class _Late(BaseException):
    """Not an Exception, since code that draws until something fits catches those."""


@contextmanager
def in_time(seconds: float) -> Iterator[Callable[[], None]]:
    """TimeoutError where the block takes more CPU time; calling what it gives starts the time anew.

    Python sees to it between two of its own steps: one long step in C is waited for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def late(number: int, frame: object) -> None:
        raise _Late

    def begin() -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)

    before = signal.signal(signal.SIGPROF, late)
    begin()
    try:
        yield begin
    except _Late:
        raise TimeoutError(f"not done within {seconds:g} s of CPU time") from None
    finally:
        try:
            signal.setitimer(signal.ITIMER_PROF, 0)
        finally:
            signal.signal(signal.SIGPROF, before)


@contextmanager
def in_memory(megabytes: float) -> Iterator[None]:
    """MemoryError where the process would grow by more inside."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + int(megabytes * (1 << 20))
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
