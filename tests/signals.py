"""Signals in the process of a test."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from megarl.host import termination


@contextmanager
def taken() -> Iterator[None]:
    """Inside, signals are taken as a run takes them; afterwards by whoever took them before, and those that came are forgotten."""
    before = {number: signal.getsignal(number) for number in termination.SIGNALS}
    termination.install()
    try:
        yield
    finally:
        termination.install()
        for number, handler in before.items():
            signal.signal(number, handler)
