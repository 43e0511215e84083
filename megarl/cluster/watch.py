"""The watch over a session: it sees processes that are stopped and machines that do not answer. Ray itself only sees those that have ended.

A rank that waits for a stopped one looks healthy, so the state of every process is read from /proc. On this machine a thread of the driver
does so. It asks nobody, because whatever it asks may be what is stopped. Other machines are asked by a second thread (`roster`).

If one of Ray's own processes is stopped or has ended, the session is lost. The run then gets `CLOSE_S` to end by itself. If it does not,
since it waits for Ray in a way that nothing can interrupt, the watch reports the failure and ends the process.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker

from megarl.cluster import server
from megarl.cluster.roster import POLLS, Roster
from megarl.cluster.scan import Scan, StoppedProcess, is_stopped
from megarl.cluster.server import ProcessStalled
from megarl.host import termination

OWN = ("gcs_server", "raylet")
POLL_S = 1.0  # how often Ray's own processes are looked after
CLOSE_S = 10.0  # for a run to end by itself once its session is lost; Ray would end it without a word after 15 s, at the earliest
SLACK_S = 10.0  # by which Ray's server may be late on a busy machine
FAILURE = 1  # exit status


class WatchFailed(RuntimeError):
    """The watch has ended or stands still, so nothing would detect a process that does."""


class Watch:
    """A watch over every process of a session; `check` raises what it has seen.

    Args:
        limit_s: how long a process may be stopped.
        own: whether this process started the session. Then all its processes belong to the run, and Ray's own on this machine are watched
            too. Otherwise the cluster may also work for others: the run's actors and their descendants are watched and ended, and of Ray's
            own processes the raylet on this machine is watched.
        on_loss: called with the reason before this process is ended because the session is lost.
    """

    def __init__(self, limit_s: float, own: bool, on_loss: Callable[[str], object] = lambda why: None) -> None:
        self._limit_s, self._on_loss = limit_s, on_loss
        self._own: dict[str, Any] = {}  # Ray's own processes on this machine, by kind
        if own:
            self._own = {kind: ray_worker._global_node.all_processes[kind][0].process for kind in OWN}
        self._host = None if own else _host()
        self._roots = tuple(process.pid for process in self._own.values())
        self._scan, self._exchange = Scan(*self._roots), threading.Lock()
        self._stopped: list[StoppedProcess] = []  # on this machine
        self._running = time.monotonic()  # when `_host` was last seen to run
        self._roster = Roster(limit_s, ray.get_runtime_context().get_node_id() if own else None, others=not own)
        self._spared: Sequence[Any] = ()  # actors: see `spare`
        self._doing = "the session"  # what the run was doing at the last check
        self._seen = time.monotonic()  # when this thread last looked
        self._failure: Exception | None = None  # that has ended it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """End the processes that are stopped, and forget what was seen. Waits until Ray knows of the machines that did not answer."""
        self._scan.end()
        with self._exchange:  # what a scan that is under way has seen is never read
            self._scan, self._stopped = Scan(*self._roots), []
        self._roster.renew()

    def spare(self, actors: Sequence[Any]) -> None:
        """Mark actors as replaceable: if one is stopped, only callers that wait for it get an error."""
        self._spared = actors

    def check(self, doing: str, groups: Mapping[str, Sequence[Any]]) -> None:
        """Raise ProcessStalled if anything in the session is stopped, naming the actor if it is one, or WatchFailed if the watch itself is.

        It asks nobody, and so returns at once.

        Args:
            doing: the work that is waited for.
            groups: the actors that do it, by the name of their kind. Spared actors that are not among them are ignored.
        """
        self._doing = doing
        for failure in (self._failure, self._roster.failure):
            if failure is not None:
                raise WatchFailed(f"{doing}: the watch over the run's processes has ended: {failure!r}") from failure
        if (late := time.monotonic() - self._seen) > 2 * self._limit_s + SLACK_S:
            raise WatchFailed(f"{doing}: the watch over the run's processes has not looked for {late:.0f} s")
        if (why := self.loss()) is not None:
            raise ProcessStalled(f"{doing}: {why}", session=True)
        labels = ((f"{kind} {index}: ", actor) for kind, actors in groups.items() for index, actor in enumerate(actors))
        names = {pid: name for name, actor in labels for pid in self._roster.pids_of(actor)}
        spared = {pid for actor in self._spared for pid in self._roster.pids_of(actor)} - names.keys()
        for pids, why in self._roster.silent:
            if pids & names.keys() or (not names and pids - spared):
                raise ProcessStalled(f"{doing}: {why}", seconds=self._limit_s)
        stopped = [one for one in self._all_stopped if spared.isdisjoint(one.pids)]
        if stopped:
            lines = [f"{next((names[pid] for pid in one.pids if pid in names), '')}{one}" for one in stopped]
            raise ProcessStalled(f"{doing}: {'; '.join(lines)}", seconds=max(one.seconds for one in stopped))

    def still(self, doing: str, kind: str, actors: Sequence[Any]) -> dict[int, ProcessStalled]:
        """Find which of these actors are stopped, have a descendant process that is, or are on a machine that does not answer.

        Args:
            doing: names the work in an error.
            kind: names the actors in an error.
            actors: the actors to look at.

        Returns:
            An error for each of them, by the actor's number.
        """
        errors = dict[int, ProcessStalled]()
        for index, actor in enumerate(actors):
            pids = self._roster.pids_of(actor)
            for one in self._all_stopped:
                if not pids.isdisjoint(one.pids):
                    errors[index] = ProcessStalled(f"{doing}: {kind} {index}: {one}", seconds=one.seconds)
            for silent_pids, why in self._roster.silent:
                if pids & silent_pids:
                    errors[index] = ProcessStalled(f"{doing}: {kind} {index}: {why}", seconds=self._limit_s)
        return errors

    def close(self) -> None:
        """End the watch. If the session is lost, kill what would be left behind, or be waited for: actors, Ray's own stopped processes."""
        if self.loss() is not None:
            for process in self._own.values():
                if is_stopped(process.pid):
                    process.kill()
            self._roster.end_actors()
        self._ended.set()
        self._roster.close()
        self._thread.join(POLL_S + SLACK_S)

    @property
    def _all_stopped(self) -> list[StoppedProcess]:
        return [*self._stopped, *self._roster.stopped]

    def _run(self) -> None:
        try:
            scanned = time.monotonic()
            while not self._ended.wait(min(POLL_S, self._limit_s / POLLS)):
                if (now := time.monotonic()) - scanned >= self._limit_s / POLLS:
                    scanned, scan = now, self._scan
                    stopped = scan.stopped(self._limit_s)
                    with self._exchange:
                        self._stopped = stopped if scan is self._scan else self._stopped
                self._seen = time.monotonic()
                if (why := self.loss()) is not None:
                    self._end(why)
                    return
        except Exception as error:
            self._failure = error

    def loss(self) -> str | None:
        """Look whether the session is lost, and return why; None if it is not."""
        if server.loss() is None and (why := self._loss()) is not None:
            server.lose(why)
        return server.loss()

    def _loss(self) -> str | None:
        for kind, process in self._own.items():
            for one in self._stopped:
                if one.pids[0] == process.pid:
                    return str(replace(one, title=f"Ray's {kind}"))
            if process.poll() is not None:
                return f"Ray's {kind} has ended (exit code {process.returncode})"
        if self._host is not None and (why := self._loss_of(self._host)) is not None:
            return why
        silent_s = time.monotonic() - self._roster.answered
        return f"Ray's server has not answered for {silent_s:.0f} s" if silent_s > self._limit_s + SLACK_S else None

    def _loss_of(self, host: psutil.Process) -> str | None:
        try:
            status = host.status()
        except psutil.NoSuchProcess:
            status = psutil.STATUS_ZOMBIE
        if status == psutil.STATUS_ZOMBIE:
            return "Ray's raylet on this machine has ended"
        now = time.monotonic()
        self._running = self._running if status == psutil.STATUS_STOPPED else now
        stopped = StoppedProcess((host.pid,), "Ray's raylet on this machine", now - self._running)
        return str(stopped) if stopped.seconds > self._limit_s else None

    def _end(self, why: str) -> None:
        """Let the run end; then end this process. Its other processes end with it (`reaper`)."""
        if not self._ended.wait(CLOSE_S):
            print(f"megarl: failed: {ProcessStalled.__name__}: {self._doing}: {why}", file=sys.stderr, flush=True)
            self._on_loss(why)
            self._roster.end_actors()
            os._exit(FAILURE)


def _host() -> psutil.Process | None:
    """The raylet of this machine, which somebody else has started; None if it is not to be seen, as from a container."""
    option = f"--raylet_socket_name={ray_worker._global_node.raylet_socket_name}"
    return next((one for one in psutil.process_iter(["cmdline"]) if option in (one.info["cmdline"] or ())), None)


_current: Watch | None = None


@contextmanager
def watched(limit_s: float, own: bool, on_loss: Callable[[str], object] = lambda why: None) -> Iterator[None]:
    """Watch the session that is open inside the block.

    Args:
        limit_s: how long a process may be stopped.
        own: whether this process started the session; see `Watch`.
        on_loss: called with the reason before this process is ended because the session is lost.
    """
    global _current
    before, _current = _current, Watch(limit_s, own, on_loss)
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


def loss() -> str | None:
    """Call `Watch.loss` of the open session."""
    return None if _current is None else _current.loss()


def still(doing: str, kind: str, actors: Sequence[Any]) -> dict[int, ProcessStalled]:
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
