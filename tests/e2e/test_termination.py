"""A signal that comes while the driver waits for Ray."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from megarl.host import termination
from megarl.host.termination import Terminated
from tests.e2e.lab import Lab
from tests.signals import taken

LATER_S = 0.3


@pytest.fixture
def never(lab: Lab) -> Iterator[Any]:
    """The result of a task that no node has room for."""
    awaited = ray.remote(resources={"nowhere": 1})(print).remote()
    yield awaited
    ray.cancel(awaited)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with taken():
        yield


WAITING = {"get": ray.get, "wait": lambda awaited: ray.wait([awaited])}


@pytest.mark.parametrize("waiting", WAITING.values(), ids=WAITING)
def test_a_signal_ends_a_wait_with_its_own_exit_status(never: Any, waiting: Callable[[Any], object]) -> None:
    threading.Timer(LATER_S, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as stop, termination.raised():
        try:
            waiting(never)
        except SystemExit as raw:
            assert not isinstance(raw, Terminated), "Ray hands exceptions of signals on by now: termination.raised can go"
            raise
    assert isinstance(stop.value, Terminated) and stop.value.code == 143 and stop.value.message == "SIGTERM"


def test_a_deferred_signal_ends_a_wait_where_the_run_can_be_saved(never: Any) -> None:
    threading.Timer(LATER_S, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    with termination.deferred(), pytest.raises(Terminated) as stop, termination.interruptible(lambda: True):
        ray.get(never)
    assert stop.value.code == 128 + signal.SIGUSR1
