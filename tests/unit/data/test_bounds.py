"""Code that would run for ever is interrupted, in the main thread and in others, and nothing is left of the bound behind it."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from megarl.data import bounds
from megarl.data.bounds import within_cpu_time

SECONDS = 0.1


def burn(seconds: float) -> None:
    """So much CPU time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def endless() -> None:
    with within_cpu_time(SECONDS):
        burn(60)


def stubborn() -> None:
    with within_cpu_time(SECONDS):
        for _ in range(3):
            with suppress(BaseException):
                burn(60)
        burn(60)


def in_steps() -> float:
    begun = time.thread_time()
    with within_cpu_time(SECONDS) as again:
        for _ in range(6):
            burn(0.4 * SECONDS)
            again()
    burn(3 * SECONDS)
    return time.thread_time() - begun


@pytest.fixture(params=["main", "other"])
def call(request: pytest.FixtureRequest) -> Callable[[Callable[[], object]], object]:
    """Calls in the main thread, or in another one."""
    if request.param == "main":
        return lambda function: function()

    def elsewhere(function: Callable[[], object]) -> object:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()

    return elsewhere


@pytest.mark.parametrize("function", [endless, stubborn])
def test_a_bounded_call_that_takes_too_long_is_interrupted(
    function: Callable[[], None], call: Callable[[Callable[[], object]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "AGAIN_S", SECONDS)
    with pytest.raises(TimeoutError, match=r"^not done within 0.1 s of CPU time$"):
        call(function)


def test_each_bounded_step_has_the_whole_time_limit(call: Callable[[Callable[[], object]], object]) -> None:
    spent = call(in_steps)
    assert isinstance(spent, float) and spent >= 5 * SECONDS
