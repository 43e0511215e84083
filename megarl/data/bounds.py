"""Time and memory limits for checks of untrusted files: a model's chat template, a data set's parameters, a compressed table."""

import ctypes
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

AGAIN_S = 1.0  # interval at which code is interrupted again, since it may catch everything


class _Late(BaseException):
    """The time limit has been exceeded. Not an Exception, since code that draws until something fits may catch those."""


@contextmanager
def within_cpu_time(seconds: float) -> Iterator[Callable[[], None]]:
    """Raise TimeoutError if the block takes more CPU time than this; calling the yielded function restarts the time.

    The block can be interrupted only between Python instructions, so a long call in C runs to its end.
    """
    clock: _Signal | _Watch = _Signal(seconds) if threading.current_thread() is threading.main_thread() else _Watch(seconds)
    try:
        try:
            clock.begin()
            yield clock.begin
        finally:
            clock.end()
    except _Late:
        clock.end()  # again, since the first call may itself have been interrupted
        raise TimeoutError(f"not done within {seconds:g} s of CPU time") from None


class _Signal:
    """A timer of the process, for the main thread, which is the only one that handles signals."""

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
    """A timer for any other thread: a helper thread that watches its CPU time."""

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
            self._raise(None)  # cancels an exception that has not been raised yet

    def _run(self) -> None:
        wait = self._seconds
        while not self._ended.wait(wait):
            with self._raising:
                wait = self._until - time.clock_gettime(self._clock)
                if wait <= 0 and not self._ended.is_set():
                    self._raise(_Late)
                    wait = AGAIN_S

    def _raise(self, error: type[BaseException] | None) -> None:
        """Raise the error in the watched thread, before its next Python instruction; None cancels a pending one."""
        exception = ctypes.py_object(error) if error is not None else None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._watched), exception)


@contextmanager
def in_memory(megabytes: float) -> Iterator[None]:
    """Raise MemoryError if the process would grow by more than this within the block.

    Only in the main thread: if this is another thread, the growth may well be due to the others.
    """
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
