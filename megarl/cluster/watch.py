"""Detect processes of a run that stand still: stopped by a signal, or on a machine that does not answer. Ray detects only ended ones.

A rank that waits for a stopped one looks healthy, so the state of every process is read from /proc: on this machine by a thread of the
driver, on every other machine by an actor.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker
from ray._private.state import state as ray_state
from ray.exceptions import RayError, RpcError

from megarl import termination
from megarl.cluster.on_node import on
from megarl.errors import Stopped

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
OWN = ("gcs_server", "raylet")
POLLS = 4  # looks within the time that a process may stand still
NOTICE_S, POLL_S = 20.0, 0.2  # how long Ray takes to notice that a node is lost; how often it is asked


class StandsStill(Stopped):
    """A process of the run is stopped, or a machine does not answer.

    Args:
        message: names the process or machine.
        session: whether it is one of Ray's own processes, so that nothing can be restarted.
        seconds: how long it has been seen to stand still.
    """

    def __init__(self, message: str, *, session: bool = False, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.session, self.seconds = session, seconds


class WatchFailed(RuntimeError):
    """The watch has ended, so nothing would detect a process that stands still."""


@dataclass(frozen=True)
class Still:
    """A process that is stopped."""

    pids: tuple[int, ...]  # its own, and those of its ancestors
    title: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.title} (pid {self.pids[0]}) has been stopped by a signal for {self.seconds:.0f} s"


class Scan:
    """A repeated scan of some processes and all their descendants, which remembers since when each has been stopped."""

    def __init__(self, *roots: int) -> None:
        self._roots, self._since = roots, dict[int, float]()
        self._found: list[Still] = []

    def still(self, longest_s: float, only: Collection[int] | None = None) -> list[Still]:
        """Return those that have been stopped for longer. `only`: restricts them to these processes and their descendants."""
        now, found, stopped = time.monotonic(), list[Still](), dict[int, float]()
        for process in (process for root in self._roots for process in _from(root)):
            try:
                if process.status() not in STOPPED:
                    continue
                stopped[process.pid] = self._since.get(process.pid, now)
                if now - stopped[process.pid] > longest_s:
                    ancestors = tuple(parent.pid for parent in process.parents())
                    if only is not None and {process.pid, *ancestors}.isdisjoint(only):
                        continue
                    title = " ".join(process.cmdline())[:80].strip()
                    found.append(Still((process.pid, *ancestors), title, now - stopped[process.pid]))
            except psutil.Error:  # it has ended
                continue
        self._since, self._found = stopped, found
        return found

    def end(self) -> None:
        """Kill the processes found by the last scan: Ray would wait for a stopped process to end itself."""
        for one in self._found:
            with suppress(ProcessLookupError):
                os.kill(one.pids[0], signal.SIGKILL)


def _from(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


class NodeScan:
    """`Scan` of Ray's processes on a machine, as an actor on that machine."""

    def __init__(self) -> None:
        self._scan = Scan(os.getppid())  # Ray's raylet, which starts all of them

    def still(self, longest_s: float, only: Collection[int] | None) -> list[Still]:
        return self._scan.still(longest_s, only)

    def end(self) -> None:
        self._scan.end()


@dataclass
class _Seen:
    """What the last look found."""

    still: list[Still] = field(default_factory=list)
    fault: str | None = None


_Place = tuple[Callable[[Collection[int] | None], list[Still]], Callable[[], object]]
"""Two functions for a machine: one returns what stands still there, the other ends it."""


class Watch:
    """A watch over every process of a session; `check` raises what it has seen.

    Args:
        limit_s: how long a process may stand still.
        own: whether this process started the session. Then all its processes belong to the run, and Ray's own on this machine are watched
            too. Otherwise the cluster may also work for others: only the run's actors and their descendants are watched and ended, and only
            the nodes they are on are looked at.
    """

    def __init__(self, limit_s: float, own: bool) -> None:
        self._limit_s = limit_s
        self._pids: dict[str, int] = {}  # of actors, by their Ray id
        self._members: dict[str, set[int]] = {}  # pids of the further members of engines, by the Ray id of the engine
        self._own: dict[str, Any] = {}  # Ray's own processes on this machine, by kind
        if own:
            self._own = {kind: ray_worker._global_node.all_processes[kind][0].process for kind in OWN}
        self._spared: Sequence[Any] = ()  # actors: see `spare`
        self._actors = dict[str, set[int]]()  # pids of the run's actors, by their node's address
        self._scans = dict[str, _Place]()  # by address
        self.renew()
        self._failure: Exception | None = None  # of the watch itself
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """End the processes that stand still, forget what was seen, and from now on watch the nodes that are alive.

        The peers of a lost node see broken connections at once, but Ray notices the loss some seconds later, and is waited for.
        """
        silent = set[str]()
        for place, (_, end) in dict(self._scans).items():
            try:
                end()
            except RayError:
                silent.add(place)
        deadline = time.monotonic() + NOTICE_S
        while any(node["Alive"] and node["NodeManagerAddress"] in silent for node in ray.nodes()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._seen, self._scans = _Seen(), {}
        if self._own:
            scan = Scan(*(process.pid for process in self._own.values()))
            self._scans["this machine"] = partial(scan.still, self._limit_s), scan.end
            here = ray.get_runtime_context().get_node_id()
            others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
            self._scans |= {node["NodeManagerAddress"]: self._remote(node["NodeID"]) for node in others}

    def spare(self, actors: Sequence[Any]) -> None:
        """Mark actors as replaceable: if one is stopped, only callers that wait for it get an error."""
        self._spared = actors

    def _remote(self, node: str) -> _Place:
        actor: Any = ray.remote(NodeScan).options(**on(node)).remote()

        def still(only: Collection[int] | None) -> list[Still]:
            return ray.get(actor.still.remote(self._limit_s, only), timeout=self._limit_s)

        return still, lambda: ray.get(actor.end.remote(), timeout=self._limit_s)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._limit_s / POLLS) and not self._session_is_over():
                self._look()
        except Exception as error:
            if not self._ended.is_set():  # otherwise the session is ending under the watch
                self._failure = error

    def _session_is_over(self) -> bool:
        """Whether one of Ray's own processes stands still. If so it is killed, since a call into Ray that waits for it would block this
        process for ever. Ray then ends this process without a message, so a message is printed first."""
        own = {process.pid: process for process in self._own.values()}
        stopped = [one for one in self._seen.still if one.pids[0] in own]
        for one in stopped:
            print(f"megarl: failed: {StandsStill.__name__}: the session: {one}", file=sys.stderr, flush=True)
            own[one.pids[0]].kill()
        return bool(stopped)

    def _look(self) -> None:
        seen, still, fault = self._seen, list[Still](), None
        scans = self._scans
        self._actors = self._of_the_run()
        for place, (scan, _) in dict(scans).items():
            if not self._own and place not in self._actors:
                continue
            try:
                still += scan(None if self._own else self._actors[place])
            except RayError as error:
                fault = f"{place} does not answer within {self._limit_s:g} s ({type(error).__name__})"
        seen.still, seen.fault = still, seen.fault or fault  # a result from before `renew` is never read
        if not self._own:
            self._follow(scans)

    def _follow(self, scans: dict[str, _Place]) -> None:
        """Add the nodes that the run has newly reached to those that are looked at, from the next look on."""
        if new := self._actors.keys() - scans.keys():
            with suppress(RpcError):  # it is tried again after the next look
                used = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] in new]
                scans |= {node["NodeManagerAddress"]: self._remote(node["NodeID"]) for node in used}

    def _of_the_run(self) -> dict[str, set[int]]:
        """The pids of the run's actors, without those of the watch, by their node's address. Notes those of members."""
        try:
            table = ray_state.actor_table(None, ray_worker.global_worker.current_job_id, "ALIVE")
        except RpcError:  # Ray's server may be restarting
            return self._actors
        found = dict[str, set[int]]()
        for actor in table.values():
            if actor["ActorClassName"] != NodeScan.__name__:
                found.setdefault(actor["Address"]["IPAddress"], set()).add(int(actor["Pid"]))
            engine, named, _ = actor["Name"].partition("/")
            if named:
                self._members.setdefault(engine, set()).add(int(actor["Pid"]))
        return found

    def check(self, doing: str, groups: Mapping[str, Sequence[Any]]) -> None:
        """Raise StandsStill if anything in the session stands still, naming the actor if it is one, or WatchFailed if the watch has ended.

        Args:
            doing: the work that is waited for.
            groups: the actors that do it, by the name of their kind. Spared actors that are not among them are ignored.
        """
        own = {process.pid for process in self._own.values()}
        stopped = any(one.pids[0] in own for one in self._seen.still)  # one that the watch has killed since
        for kind, process in self._own.items():
            if process.poll() is not None and not stopped:
                raise StandsStill(f"{doing}: Ray's {kind} has ended (exit code {process.returncode})", session=True)
        if self._failure is not None:
            raise WatchFailed(f"{doing}: the watch over the run's processes has ended: {self._failure!r}") from self._failure
        if self._seen.fault is not None:
            raise StandsStill(f"{doing}: {self._seen.fault}", seconds=self._limit_s)
        named = ((f"{kind} {index}: ", actor) for kind, actors in groups.items() for index, actor in enumerate(actors))
        names = {pid: name for name, actor in named for pid in self._pids_of(actor)}
        spared = {pid for actor in self._spared for pid in self._pids_of(actor)} - names.keys()
        still = [one for one in self._seen.still if spared.isdisjoint(one.pids)]
        if still:
            said = [f"{next((names[pid] for pid in one.pids if pid in names), '')}{one}" for one in still]
            raise StandsStill(f"{doing}: {'; '.join(said)}", session=stopped, seconds=max(one.seconds for one in still))

    def still(self, doing: str, kind: str, actors: Sequence[Any]) -> dict[int, StandsStill]:
        """Find which of these actors stand still, or have a descendant process that does.

        Args:
            doing: names the work in an error.
            kind: names the actors in an error.
            actors: the actors to look at.

        Returns:
            An error for each of them, by the actor's number.
        """
        found = dict[int, StandsStill]()
        for one in self._seen.still:
            for index, actor in enumerate(actors):
                if not self._pids_of(actor).isdisjoint(one.pids):
                    found[index] = StandsStill(f"{doing}: {kind} {index}: {one}", seconds=one.seconds)
        return found

    def _pids_of(self, actor: Any) -> set[int]:
        """The pids of an actor's process, and of those of its members: actors named after it (`workers/engine_member.py`).

        Ray is asked for them while all is well, since its server may be what stands still later.
        """
        identity = actor._actor_id.hex()
        if not self._pids.get(identity):
            self._pids[identity] = int(ray_state.actor_table(identity).get("Pid", 0))
        return {self._pids[identity], *self._members.get(identity, ())}

    def close(self) -> None:
        """End the watch, and kill any of Ray's own processes that stands still, since a shutdown would wait for it."""
        for process in self._own.values():
            with suppress(psutil.Error):
                if psutil.Process(process.pid).status() in STOPPED:
                    process.kill()
        self._ended.set()
        self._thread.join(self._limit_s)


_current: Watch | None = None


@contextmanager
def watched(limit_s: float, own: bool) -> Iterator[None]:
    """Watch the session that is open inside the block."""
    global _current
    before, _current = _current, Watch(limit_s, own)
    try:
        yield
    finally:
        _current.close()
        _current = before


def check(doing: str, groups: Mapping[str, Sequence[Any]]) -> None:
    """Call `termination.poll`, and `Watch.check` of the open session."""
    termination.poll()
    if _current is not None:
        _current.check(doing, groups)


def still(doing: str, kind: str, actors: Sequence[Any]) -> dict[int, StandsStill]:
    """Call `Watch.still` of the open session."""
    return {} if _current is None else _current.still(doing, kind, actors)


def spare(actors: Sequence[Any]) -> None:
    """Call `Watch.spare` of the open session."""
    if _current is not None:
        _current.spare(actors)


def renew() -> None:
    """Call `Watch.renew` of the open session."""
    if _current is not None:
        _current.renew()
