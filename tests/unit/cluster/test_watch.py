"""The watch over a session's processes, without a session."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from megarl.cluster import watch
from megarl.cluster.watch import StandsStill, Watch, WatchFailed


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    nodes = SimpleNamespace(nodes=list, get_runtime_context=lambda: None)
    monkeypatch.setattr(watch, "ray", nodes)
    found = Watch(0.02, own=False)
    yield found
    found.close()


def seen(watched: Watch, scan: Any) -> None:
    """Looks by `scan` until `check` has something to say."""
    watched._scans = {"node 7": (scan, lambda: None)}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        watched.check("update", {})
        time.sleep(0.005)


def test_a_machine_that_does_not_answer_is_named(watched: Watch) -> None:
    def late() -> Any:
        raise GetTimeoutError

    with pytest.raises(StandsStill, match=r"^update: node 7 does not answer within 0\.02 s \(GetTimeoutError\)$"):
        seen(watched, late)


def test_a_watch_that_fails_itself_says_so_and_does_not_leave_the_run_unwatched(watched: Watch) -> None:
    def broken() -> Any:
        raise ValueError("no such column")

    with pytest.raises(WatchFailed, match="^update: the watch over the run's processes has ended: ValueError"):
        seen(watched, broken)
