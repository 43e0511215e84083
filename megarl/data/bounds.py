"""Bounds on what a file can make a check do: a model's chat template, the parameters of a data set, a compressed table."""

from __future__ import annotations

import ctypes
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

AGAIN_S = 1.0  # code that catches everything is interrupted as often as it takes


class _Late(BaseException):
    """Not an Exception, since code that draws until something fits catches those."""


@contextmanager
def within_cpu_time(seconds: float) -> Iterator[Callable[[], None]]:
    """TimeoutError where the block takes more CPU time; calling what it gives starts the time anew.

    Python sees to it between two of its own steps: one long step in C is waited for.
    """
    clock: _Signal | _Watch = _Signal(seconds) if threading.current_thread() is threading.main_thread() else _Watch(seconds)
    try:
        try:
            clock.begin()
            yield clock.begin
        finally:
            clock.end()
    except _Late:
        clock.end()  # which may have been cut short itself
        raise TimeoutError(f"not done within {seconds:g} s of CPU time") from None


class _Signal:
    """A timer of the process, for its main thread, which alone handles signals."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._before = signal.signal(signal.SIGPROF, self._late)

    @staticmethod
    def _late(number: int, frame: object) -> None:
        raise _Late

    def begin(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds, AGAIN_S)

    def end(self) -> None:
        try:
            signal.setitimer(signal.ITIMER_PROF, 0)
        finally:
            signal.signal(signal.SIGPROF, self._before)


class _Watch:
    """A thread beside another one than the main thread, whose CPU time it reads."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._watched, self._ended = seconds, threading.get_ident(), threading.Event()
        self._clock = time.pthread_getcpuclockid(self._watched)
        self._raising = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self) -> None:
        self._until = time.clock_gettime(self._clock) + self._seconds

    def end(self) -> None:
        with self._raising:
            self._ended.set()
            self._raise(None)  # takes back what has not been raised yet

    def _run(self) -> None:
        wait = self._seconds
        while not self._ended.wait(wait):
            with self._raising:
                wait = self._until - time.clock_gettime(self._clock)
                if wait <= 0 and not self._ended.is_set():
                    self._raise(_Late)
                    wait = AGAIN_S

    def _raise(self, error: type[BaseException] | None) -> None:
        """In the watched thread, before its next step."""
        given = ctypes.py_object(error) if error is not None else None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), given)


@contextmanager
def in_memory(megabytes: float) -> Iterator[None]:
    """MemoryError where the process would grow by more inside. In the main thread alone: beside others, they may be what needs more."""
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
