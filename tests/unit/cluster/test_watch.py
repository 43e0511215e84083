"""The watch over a session's processes, without a session."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from megarl.cluster import watch
from megarl.cluster.watch import Scan, StandsStill, Watch, WatchFailed


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    nodes = SimpleNamespace(nodes=list, get_runtime_context=lambda: None)
    monkeypatch.setattr(watch, "ray", nodes)
    monkeypatch.setattr(Watch, "_of_the_run", lambda self: {"node 7": {7}})
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
    def late(only: Any) -> Any:
        raise GetTimeoutError

    with pytest.raises(StandsStill, match=r"^update: node 7 does not answer within 0\.02 s \(GetTimeoutError\)$"):
        seen(watched, late)


def test_a_watch_that_fails_itself_says_so_and_does_not_leave_the_run_unwatched(watched: Watch) -> None:
    def broken(only: Any) -> Any:
        raise ValueError("no such column")

    with pytest.raises(WatchFailed, match="^update: the watch over the run's processes has ended: ValueError"):
        seen(watched, broken)


def test_nodes_without_an_actor_of_the_run_are_nobodys_affair(watched: Watch) -> None:
    asked = list[Any]()

    def elsewhere(only: Any) -> Any:
        raise GetTimeoutError

    def here(only: Any) -> list[Any]:
        asked.append(only)
        return []

    watched._scans = {"node 8": (elsewhere, lambda: None), "node 7": (here, lambda: None)}
    deadline = time.monotonic() + 30
    while len(asked) < 3 and time.monotonic() < deadline:
        watched.check("update", {})
        time.sleep(0.005)
    assert asked[:3] == [{7}] * 3


def test_only_nodes_that_the_run_uses_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = [{"NodeID": f"id {n}", "NodeManagerAddress": f"node {n}", "Alive": n != 9} for n in (7, 8, 9)]
    runs: dict[str, set[int]] = {}
    watched, looked = list[str](), list[str]()

    def remote(self: Watch, node: str) -> Any:
        watched.append(node)

        def look(only: Any) -> list[Any]:
            looked.append(node)
            return []

        return look, lambda: None

    monkeypatch.setattr(watch, "ray", SimpleNamespace(nodes=lambda: alive))
    monkeypatch.setattr(Watch, "_of_the_run", lambda self: dict(runs))
    monkeypatch.setattr(Watch, "_remote", remote)
    joined = Watch(3600.0, own=False)
    try:
        joined._look()
        assert not watched, "no actor is anywhere yet"
        runs |= {"node 7": {1}, "node 9": {2}}
        for _ in range(3):
            joined._look()
        assert watched == ["id 7"] and looked == ["id 7"] * 2
        runs["node 8"] = {3}
        for _ in range(2):
            joined._look()
        assert watched == ["id 7", "id 8"] and looked[2:] == ["id 7", "id 7", "id 8"]
    finally:
        joined.close()


def test_only_what_belongs_to_the_run_is_seen_and_ended() -> None:
    """Of two programs that have stopped a child, one is another's."""
    mine, theirs = (subprocess.Popen(["bash", "-c", "kill -STOP $BASHPID & sleep 60"], start_new_session=True) for _ in range(2))
    try:
        scan, deadline = Scan(os.getpid()), time.monotonic() + 30
        while len(scan.still(0.0)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        [found] = scan.still(0.0, {mine.pid})
        assert mine.pid in found.pids
        scan.end()
        while len(left := scan.still(0.0)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [theirs.pid in one.pids for one in left] == [True]
    finally:
        for one in (mine, theirs):
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()
