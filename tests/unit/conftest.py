"""Fixtures of the tests in one process."""

import signal
from collections.abc import Iterator

import pytest

from megarl.host.termination import SIGNALS


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The command line takes signals over; after a test that runs it in this process, they mean what they meant before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
