"""The watch over a session's processes: it depends on nothing that it watches."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from megarl.cluster import roster, server, watch
from megarl.cluster.roster import Actors, Roster
from megarl.cluster.scan import Scan, StoppedProcess, kill_children
from megarl.cluster.server import ProcessStalled, ask
from megarl.cluster.watch import Watch, WatchFailed
from tests.rows import rows

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    """A new one, which is not lost."""
    server.lose(None)
    yield
    server.lose(None)


class Machines:
    """Stands in for Ray: machines with an actor of the run each, whose scans answer as `answer` says; None: not at all."""

    def __init__(self, answer: dict[str, Callable[[], Any] | None]) -> None:
        self.answer, self.asked, self.killed = answer, list[str](), list[Any]()
        self.left: dict[str, set[int]] = {}  # the processes that the scan of a machine was told to end

    def actors(self) -> Actors:
        nodes = list(self.answer)  # a test may change them meanwhile
        return Actors(
            pids={f"actor {node}": number for number, node in enumerate(nodes, 7)},
            at={node: {number} for number, node in enumerate(nodes, 7)},
            addresses={node: f"address of {node}" for node in nodes},
        )

    def scan_on(self, node: str) -> Any:
        def remote(longest_s: float, only: Any) -> Any:
            self.asked.append(node)
            return node, self.answer[node], only

        def leave(pids: set[int]) -> Any:
            self.left[node] = pids
            return node, self.answer[node], None

        return SimpleNamespace(stopped=SimpleNamespace(remote=remote), leave=SimpleNamespace(remote=leave), node=node)

    def wait(self, questions: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = [question for question in questions if question[1] is not None]
        if len(ready) < num_returns:
            time.sleep(timeout)
        return ready, [question for question in questions if question not in ready]

    def get(self, question: Any) -> Any:
        return question[1]()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines({})
    monkeypatch.setattr(roster, "ray", found)
    monkeypatch.setattr(roster, "_actors", found.actors)
    monkeypatch.setattr(roster, "_scan_on", found.scan_on)
    monkeypatch.setattr(roster, "START_S", 0.0)
    monkeypatch.setattr(roster, "AGAIN_S", 0.5)
    monkeypatch.setattr(watch, "ray", SimpleNamespace(get_runtime_context=lambda: None))
    monkeypatch.setattr(watch, "_host", lambda: None)
    return found


@pytest.fixture
def watched(machines: Machines) -> Iterator[Watch]:
    found = Watch(0.02, own=False)
    yield found
    found.close()
    within(30, lambda: not found._roster._thread.is_alive())  # it would meet the next test's machines, or Ray itself


def within(seconds: float, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def raised(watched: Watch, groups: Any) -> str:
    """What `check` raises in the end."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            watched.check("update", groups)
        except ProcessStalled as error:
            return str(error)
        time.sleep(0.005)
    return "nothing"


def actor(node: str) -> Any:
    return SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: f"actor {node}"))


def test_a_silent_machine_is_named_and_fails_only_actors_on_it(machines: Machines, watched: Watch) -> None:
    machines.answer |= {"node 7": None, "node 8": list}
    ranks = {"rank": [actor("node 8"), actor("node 7")]}
    assert raised(watched, ranks) == "update: address of node 7 does not answer within 0.02 s (GetTimeoutError)"
    assert raised(watched, {}) == raised(watched, ranks)
    watched.check("update", {"rank": [actor("node 8")]})
    [(index, fault)] = watched.still("rollout", "engine", ranks["rank"]).items()
    assert index == 1 and str(fault).startswith("rollout: engine 1: address of node 7 does not answer")
    watched.spare([actor("node 7")])
    watched.check("update", {})


@pytest.mark.parametrize("lost", [True, False])
def test_actors_in_a_cluster_of_others_are_ended_if_its_server_is_lost(
    machines: Machines, watched: Watch, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each machine itself, and without waiting for one that is silent. Otherwise Ray's server ends them."""
    monkeypatch.setattr(roster, "LEAVE_S", 0.2)
    machines.answer |= {"node 7": list, "node 8": list}
    within(30, lambda: {*machines.asked} == {"node 7", "node 8"})
    machines.answer["node 8"] = None
    if lost:
        server.lose("Ray's server has not answered for 13 s")
    watched.close()
    assert machines.left == ({"node 7": {7}, "node 8": {8}} if lost else {})


def test_only_processes_of_the_machines_raylet_are_killed() -> None:
    """A process id that is known may be another process's by now."""
    mine, other = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["bash", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    assert other.stdout is not None
    theirs = int(other.stdout.readline())
    try:
        kill_children(os.getpid(), [mine.pid, theirs, 2**22 + 1])
        assert mine.wait(30) == -signal.SIGKILL and os.path.exists(f"/proc/{theirs}")
    finally:
        os.kill(theirs, signal.SIGKILL)
        other.wait(30)
        other.stdout.close()


def test_several_silent_machines_are_detected_in_one_wait(machines: Machines, watched: Watch) -> None:
    """And not one after the other: two waits, for the first and for the second actor there, not sixteen."""
    watched.close()
    slow = Roster(0.4, None, others=False)
    try:
        machines.answer |= {f"node {n}": None for n in range(8)} | {"node 9": list}
        begun = time.monotonic()
        within(30, lambda: len(slow.silent) == 8)
        assert time.monotonic() - begun < 8 * 0.4
    finally:
        slow.close()


def test_a_dead_or_stopped_scan_is_not_reported_as_a_silent_machine(
    machines: Machines, watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died() -> Any:
        raise ActorDiedError

    def kill(actor: Any) -> None:
        machines.answer[actor.node] = list  # the next scan there answers, however soon it is asked
        machines.killed.append(actor)

    monkeypatch.setattr(machines, "kill", kill)
    for number, first in enumerate((died, None), 1):
        machines.answer["node 7"] = first
        within(30, lambda: len(machines.killed) == number)  # noqa: B023
        machines.asked.clear()
        within(30, lambda: len(machines.asked) > 20)
        watched.check("update", {})
    assert not watched._roster.silent


def test_only_machines_of_the_run_are_scanned_and_only_for_its_processes(machines: Machines, watched: Watch) -> None:
    only = list[Any]()
    scan_on = machines.scan_on

    def noting(node: str) -> Any:
        scan = scan_on(node)
        ask_machine = scan.stopped.remote

        def remote(longest_s: float, pids: Any) -> Any:
            only.append((node, pids))
            return ask_machine(longest_s, pids)

        scan.stopped.remote = remote
        return scan

    roster._scan_on = noting
    machines.answer |= {"node 7": list}
    within(30, lambda: len(only) > 3)
    assert set(map(str, only)) == {"('node 7', {7})"}
    machines.answer["node 8"] = list
    within(30, lambda: ("node 8", {8}) in only)
    del machines.answer["node 7"]
    within(30, lambda: "node 7" not in watched._roster._machines)


def test_a_failing_watch_ends_the_run_with_its_own_error(machines: Machines, watched: Watch) -> None:
    def broken() -> Any:
        raise ValueError("no such column")

    machines.answer["node 7"] = broken
    with pytest.raises(WatchFailed, match="^update: the watch over the run's processes has ended: ValueError"):
        raised(watched, {})


def test_a_stalled_watch_is_detected_by_the_run(machines: Machines, watched: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SLACK_S", 0.0)
    blocked = threading.Event()
    monkeypatch.setattr(watched._scan, "stopped", lambda limit_s: blocked.wait(60))
    try:
        with pytest.raises(WatchFailed, match=r"^update: the watch over the run's processes has not looked for \d s$"):
            raised(watched, {})
    finally:
        blocked.set()


def test_a_scan_that_ends_during_a_renewal_of_the_watch_raises_nothing(
    machines: Machines, watched: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a process that the renewal has killed, whose name is gone already: another restart for nothing."""
    begun, ended = threading.Event(), threading.Event()

    def scan(limit_s: float) -> list[StoppedProcess]:
        begun.set()
        assert ended.wait(60)
        return [StoppedProcess((1,), "", 1.0)]

    monkeypatch.setattr(watched._scan, "stopped", scan)
    monkeypatch.setattr(watch, "SLACK_S", 60.0)
    monkeypatch.setattr(watched._roster, "renew", lambda: None)  # which asks Ray
    assert begun.wait(60)
    first = watched._scan
    watched.renew()
    ended.set()
    seen = watched._seen
    within(30, lambda: watched._seen > seen)
    assert watched._scan is not first and watched._stopped == []
    watched.check("update", {})


def test_a_ray_server_that_does_not_answer_ends_the_session(machines: Machines, watched: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SLACK_S", 0.2)
    blocked = threading.Event()
    monkeypatch.setattr(roster, "_actors", lambda: blocked.wait(60))
    try:
        assert raised(watched, {}) == "update: Ray's server has not answered for 0 s"
        assert server.loss() is not None
        begun = time.monotonic()
        with pytest.raises(ProcessStalled, match="^recovery: Ray's server has not answered for 0 s$"):
            ask("recovery", lambda: blocked.wait(60))
        assert time.monotonic() - begun < 1
    finally:
        watched.close()
        blocked.set()


def test_a_call_into_the_server_ends_when_its_time_is_over() -> None:
    blocked = threading.Event()
    try:
        with pytest.raises(ProcessStalled, match=r"^ending processes: Ray's server has not answered within 0\.3 s$") as raised:
            ask("ending processes", lambda: blocked.wait(60), timeout_s=0.3)
        assert raised.value.session
    finally:
        blocked.set()
    assert ask("a call", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        ask("a call", lambda: 1 // 0)


def test_a_scan_sees_and_ends_only_the_runs_processes() -> None:
    """Of two programs that have stopped a child, one is another's."""
    mine, theirs = (subprocess.Popen(["bash", "-c", "bash -c 'kill -STOP $$' & sleep 60"]) for _ in range(2))
    try:
        scan, deadline = Scan(os.getpid()), time.monotonic() + 30
        while len(scan.stopped(0.0)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        [found] = scan.stopped(0.0, {mine.pid})
        assert mine.pid in found.pids
        scan.end()
        while len(left := scan.stopped(0.0)) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [theirs.pid in one.pids for one in left] == [True]
        scan.end()
    finally:
        for one in (mine, theirs):
            one.kill()
            one.wait()


def test_processes_stopped_in_a_sandbox_are_ignored() -> None:
    """A sandbox's first process leads a session of its own: nothing below it is seen, whatever it does."""
    program = ["bash", "-c", "bash -c 'kill -STOP $$' & kill -STOP $$"]
    parent = "import subprocess, sys, time; subprocess.Popen(sys.argv[2:], start_new_session=sys.argv[1] == 'True'); time.sleep(60)"
    inside, outside = (subprocess.Popen([sys.executable, "-c", parent, str(own), *program]) for own in (True, False))
    try:
        scan = Scan(os.getpid())
        within(30, lambda: len(scan.stopped(0.0, {outside.pid})) == 2)
        time.sleep(0.5)
        assert scan.stopped(0.0, {inside.pid}) == []
    finally:
        for one in (inside, outside):
            for child in subprocess.run(["pgrep", "-P", str(one.pid)], capture_output=True, text=True).stdout.split():
                for pid in subprocess.run(["pgrep", "-P", child], capture_output=True, text=True).stdout.split():
                    os.kill(int(pid), signal.SIGKILL)
                os.kill(int(child), signal.SIGKILL)
            one.kill()
            one.wait()


# A session of which one process is stopped or killed, while the main thread is in a call that nothing interrupts, or waits as a run does.
LOST = """
    import os, signal, sys, time, ray
    from megarl.cli import command as cli
    from megarl.cluster import watch
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings

    victim, number, doing = sys.argv[1], signal.Signals[sys.argv[2]], sys.argv[3]
    watch.CLOSE_S = 2.0

    def work():
        with ray_session(ClusterSettings(gpus=False, start_timeout_s=300, stall_timeout_s=2), actors=1):
            actor = ray.remote(type("Worker", (), {"here": lambda self: True})).remote()
            ray.get(actor.here.remote())
            os.kill(watch._current._own[victim].pid, number)
            print("broken", flush=True)
            if doing == "waiting":
                while True:
                    time.sleep(0.1)
                    watch.check("update", {"rank": [actor]})
            while True:
                ray.nodes() if doing == "blocked" else time.sleep(3600)

    status = cli._guarded(work, None)
    cli._leave_lost_session(status)
"""


@pytest.mark.parametrize(
    ("victim", "number", "doing"),
    rows(
        [
            ("gcs_server", "SIGSTOP", "waiting"),
            ("gcs_server", "SIGSTOP", "blocked"),
            ("gcs_server", "SIGKILL", "blocked"),
            ("raylet", "SIGSTOP", "waiting"),
        ],
        [("gcs_server", "SIGSTOP", "blocked"), ("raylet", "SIGSTOP", "waiting")],
    ),
)
def test_a_lost_session_ends_its_run_with_a_line_whatever_the_run_is_doing(tmp_path: Path, victim: str, number: str, doing: str) -> None:
    begun = time.monotonic()
    command = [sys.executable, "-c", textwrap.dedent(LOST), victim, number, doing]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == "broken\n", done.stderr
    assert time.monotonic() - begun < 60
    what = "has ended" if number == "SIGKILL" else r"\(pid \d+\) has been stopped by a signal for \d s"
    [line] = [line for line in done.stderr.splitlines() if line.startswith("megarl: failed: ")]
    assert re.match(rf"megarl: failed: ProcessStalled: (update|the session): Ray's {victim} {what}", line), done.stderr
