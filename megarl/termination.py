"""SIGTERM and SIGHUP, as schedulers and closed terminals send them: a run that trains stops where it can be saved.

Elsewhere they are an exception in the main thread, at once or, while a run recovers, at the next wait. A second one is, at once and
everywhere: whoever sends it does not want to wait.
SIGUSR1 is Slurm's warning of what is to come (`megarl slurm`): the same, but that it may come as often as it likes.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Terminated(SystemExit):
    """Ended by a signal, with its exit status. No Exception: nothing that goes on after failures goes on after it."""

    def __init__(self, number: int, saved: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.message = number, f"{signal.Signals(number).name}{saved}"


_asked: int | None = None
_may_raise: Callable[[], bool] | None = None  # None: always
_polled = False


def install() -> None:
    """Takes the signals, but one that is ignored (nohup), and forgets those that came before."""
    global _asked
    _asked = None
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _take)


def asked() -> int | None:
    """The signal that came, and was not raised."""
    return _asked


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, a first signal is only noted, but where the block is `interruptible`. Who defers looks at `asked`."""
    with _raised_where(lambda: False):
        yield


@contextmanager
def interruptible(now: Callable[[], bool]) -> Iterator[None]:
    """Inside, a signal raises Terminated while `now()`; so does one that was noted before."""
    with _raised_where(now):
        if _asked is not None and now():
            raise Terminated(_asked)
        yield


@contextmanager
def polled() -> Iterator[None]:
    """Inside, a first signal is only noted, and `poll` raises Terminated, as the block's end does: for work that must not be cut off at an
    arbitrary line.

    Not in a block inside that is `deferred` or `interruptible`.
    """
    with _raised_where(lambda: False, polled=True):
        yield
        poll()


def poll() -> None:
    """Where the work is `polled`, Terminated for a signal that was noted. Whoever waits in such work calls it about every second."""
    if _polled and _asked is not None and threading.current_thread() is threading.main_thread():
        raise Terminated(_asked)


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
    """Gives a signal its exception back: within ray.get and ray.wait it becomes a SystemExit(1) (ray 2.60.0, _raylet.pyx:712)."""
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
