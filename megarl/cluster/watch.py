"""Sees processes of a run that stand still: stopped by a signal, or on a machine that does not answer. Ray sees only those that have ended.

A rank that waits for a stopped one looks healthy, so the state of every process is read from /proc: on this machine by a thread of the
driver, on each further one by an actor.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker
from ray._private.state import state as ray_state
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.errors import Stopped

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
OWN = ("gcs_server", "raylet")
POLLS = 4  # within the time that a process may stand still


class StandsStill(Stopped):
    """A process of the run, or a machine, does not move."""


@dataclass(frozen=True)
class Still:
    """A process that is stopped."""

    pids: tuple[int, ...]  # its own, and those of its ancestors
    title: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.title} (pid {self.pids[0]}) has been stopped by a signal for {self.seconds:.0f} s"


class Scan:
    """Some processes and all that they have started, and since when they are stopped."""

    def __init__(self, *roots: int) -> None:
        self._roots, self._since = roots, dict[int, float]()

    def still(self, longest_s: float) -> list[Still]:
        """Those that have been stopped for longer."""
        now, found, stopped = time.monotonic(), list[Still](), dict[int, float]()
        for process in (process for root in self._roots for process in _from(root)):
            try:
                if process.status() not in STOPPED:
                    continue
                stopped[process.pid] = self._since.get(process.pid, now)
                if now - stopped[process.pid] > longest_s:
                    ancestors = tuple(parent.pid for parent in process.parents())
                    title = " ".join(process.cmdline())[:80].strip()
                    found.append(Still((process.pid, *ancestors), title, now - stopped[process.pid]))
            except psutil.Error:  # it has ended
                continue
        self._since = stopped
        return found


def _from(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


class NodeScan:
    """`Scan` of a machine's processes of Ray, as an actor there."""

    def __init__(self) -> None:
        self._scan = Scan(os.getppid())  # Ray's raylet, which starts all of them

    def still(self, longest_s: float) -> list[Still]:
        return self._scan.still(longest_s)


class Watch:
    """Looks at every process of a session; `check` raises what it has seen.

    Args:
        limit_s: how long a process may stand still.
        alone: the session is this machine's; its own processes of Ray are watched too.
    """

    def __init__(self, limit_s: float, alone: bool) -> None:
        self._limit_s = limit_s
        self._fault: str | None = None
        self._still: list[Still] = []
        self._pids: dict[str, int] = {}
        self._own: dict[str, Any] = {}  # Ray's processes, by kind
        self._scans = dict[str, Callable[[], list[Still]]]()
        if alone:
            self._own = {kind: ray_worker._global_node.all_processes[kind][0].process for kind in OWN}
            scan = Scan(*(process.pid for process in self._own.values()))
            self._scans["this machine"] = lambda: scan.still(limit_s)
        else:
            for node in ray.nodes():
                self._scans[node["NodeManagerAddress"]] = self._remote(node["NodeID"])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _remote(self, node: str) -> Callable[[], list[Still]]:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        actor: Any = ray.remote(NodeScan).options(num_cpus=0, scheduling_strategy=place).remote()
        return lambda: ray.get(actor.still.remote(self._limit_s), timeout=self._limit_s)

    def _run(self) -> None:
        while not self._ended.wait(self._limit_s / POLLS):
            still = []
            for place, scan in self._scans.items():
                try:
                    still += scan()
                except RayError as error:
                    self._fault = f"{place} does not answer within {self._limit_s:g} s ({type(error).__name__})"
            self._still = still
            for kind, process in self._own.items():
                if process.poll() is not None:
                    self._fault = f"Ray's {kind} has ended (exit code {process.returncode})"

    def check(self, doing: str, kind: str, actors: Sequence[Any]) -> None:
        """StandsStill where something of the session stands still; named as one of the actors where it is.

        Args:
            doing: the work that is waited for.
            kind: of the actors.
            actors: those that do it.
        """
        if self._fault is not None:
            raise StandsStill(f"{doing}: {self._fault}")
        pids = {self._pid(actor): f"{kind} {index}: " for index, actor in enumerate(actors)}
        if self._still:
            named = [f"{next((pids[pid] for pid in still.pids if pid in pids), '')}{still}" for still in self._still]
            raise StandsStill(f"{doing}: {'; '.join(named)}")

    def _pid(self, actor: Any) -> int:
        """Of an actor's process. Asked of Ray while all is well: its server may be what stands still."""
        identity = actor._actor_id.hex()
        if not self._pids.get(identity):
            self._pids[identity] = int(ray_state.actor_table(identity).get("Pid", 0))
        return self._pids[identity]

    def close(self) -> None:
        """Ends the watch, and what stands still of Ray's own, which a shutdown would wait for."""
        for process in self._own.values():
            with suppress(psutil.Error):
                if psutil.Process(process.pid).status() in STOPPED:
                    process.kill()
        self._ended.set()
        self._thread.join(self._limit_s)


_current: Watch | None = None


@contextmanager
def watched(limit_s: float, alone: bool) -> Iterator[None]:
    """Watches the session that is open inside."""
    global _current
    before, _current = _current, Watch(limit_s, alone)
    try:
        yield
    finally:
        _current.close()
        _current = before


def check(doing: str, kind: str, actors: Sequence[Any]) -> None:
    """`Watch.check` of the session that is open; without one nothing is watched."""
    if _current is not None:
        _current.check(doing, kind, actors)
