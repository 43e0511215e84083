"""Handle SIGTERM and SIGHUP, as schedulers and closed terminals send them: a training run stops where it can be saved.

Elsewhere they raise an exception in the main thread, at once or, while a run recovers, at the next wait. A second signal raises it at once
everywhere: whoever sends it does not want to wait.
SIGUSR1 is Slurm's warning that one of them will follow (`megarl slurm`). It is handled the same way, except that repeats are ignored.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Terminated(SystemExit):
    """Ended by a signal, with its exit status. Not an Exception, so that code that continues after failures does not continue after it."""

    def __init__(self, number: int, saved: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.message = number, f"{signal.Signals(number).name}{saved}"


_asked: int | None = None
_may_raise: Callable[[], bool] | None = None  # None: always
_polled = False


def install() -> None:
    """Install the handlers, except for signals that are ignored (nohup), and forget signals received before."""
    global _asked
    _asked = None
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _take)


def asked() -> int | None:
    """The signal that was received and not raised; None if there was none."""
    return _asked


@contextmanager
def deferred() -> Iterator[None]:
    """Only note a first signal inside the block, except where it is `interruptible`. The caller must look at `asked`."""
    with _raised_where(lambda: False):
        yield


@contextmanager
def interruptible(now: Callable[[], bool]) -> Iterator[None]:
    """Raise Terminated for a signal inside the block while `now()` is true; also for one that was noted before the block."""
    with _raised_where(now):
        if _asked is not None and now():
            raise Terminated(_asked)
        yield


@contextmanager
def polled() -> Iterator[None]:
    """Only note a first signal inside the block; `poll` and the end of the block then raise Terminated.

    For work that must not be cut off at an arbitrary line. Does not apply to an inner block that is `deferred` or `interruptible`.
    """
    with _raised_where(lambda: False, polled=True):
        yield
        poll()


def poll() -> None:
    """Raise Terminated for a signal that was noted, if the work is `polled`. Waits in such work call this about every second."""
    if _polled and _asked is not None and threading.current_thread() is threading.main_thread():
        raise Terminated(_asked)


@contextmanager
def withheld() -> Iterator[None]:
    """Keep SIGTERM from the processes that this thread starts inside the block, and from those that they start.

    A scheduler may send it to every process of a run at once, to warn the run: Slurm before a preemption, `timeout`, systemd. The run needs
    them to save itself, and ends them by SIGKILL.
    """
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # children inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


@contextmanager
def _raised_where(now: Callable[[], bool], polled: bool = False) -> Iterator[None]:
    global _may_raise, _polled
    before, _may_raise, _polled = (_may_raise, _polled), now, polled
    try:
        with raised():
            yield
    finally:
        _may_raise, _polled = before


@contextmanager
def raised() -> Iterator[None]:
    """Restore the exception of a signal: inside ray.get and ray.wait it becomes a SystemExit(1) (ray 2.60.0, _raylet.pyx:712)."""
    try:
        yield
    except SystemExit as stop:
        if _asked is None or isinstance(stop, Terminated):
            raise
        raise Terminated(_asked) from None


def _take(number: int, frame: FrameType | None) -> None:
    global _asked
    if number == signal.SIGUSR1 and _asked is not None:
        return
    first, _asked = _asked in (None, signal.SIGUSR1), number
    if not first or _may_raise is None or _may_raise():
        raise Terminated(number)
    then = "the run ends" if _polled else "the run is saved after this step"
    print(f"megarl: {signal.Signals(number).name}: {then}; a second signal ends it at once", file=sys.stderr, flush=True)
