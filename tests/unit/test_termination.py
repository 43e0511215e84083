"""When a signal ends a run: SIGUSR1 may come as often as Slurm likes, a second SIGTERM is meant."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.cluster import watch
from megarl.host import termination
from megarl.host.termination import Terminated
from tests.signals import taken


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with taken():
        yield


def test_slurms_warning_is_noted_once_and_raised_where_the_run_can_be_saved() -> None:
    with termination.deferred():
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
        assert termination.asked() == signal.SIGUSR1
        with pytest.raises(Terminated) as stop, termination.interruptible(lambda: True):
            raise AssertionError("not reached")
        assert stop.value.code == 128 + signal.SIGUSR1
        signal.raise_signal(signal.SIGUSR1)  # while it is being saved


def test_sigterm_after_the_warning_leaves_time_to_save_and_a_second_one_does_not() -> None:
    with termination.deferred():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert termination.asked() == signal.SIGTERM
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)


def test_where_nothing_can_be_saved_the_warning_ends_the_run_at_once() -> None:
    with pytest.raises(Terminated):
        signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)  # while it ends


def test_work_that_is_polled_is_left_at_its_waits_and_its_end_alone() -> None:
    at_its_end = False
    with pytest.raises(Terminated), termination.polled():
        termination.poll()
        signal.raise_signal(signal.SIGTERM)
        with termination.deferred():
            termination.poll()  # a step has begun: it can be saved
        with ThreadPoolExecutor(1) as there:  # of the engines ahead: what it raised would not end the run
            there.submit(termination.poll).result()
        with pytest.raises(Terminated) as stop:
            watch.check("weights sync", {})
        assert stop.value.code == 143
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        at_its_end = True
    assert at_its_end
    termination.poll()
