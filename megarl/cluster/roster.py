"""Which processes Ray runs for this session, and what is stopped on other machines: asked by a thread of its own, read by the `Watch`.

Whatever is asked may not answer, or not for a minute. So nobody waits for this thread: it leaves what it has learned, and when.
"""

import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray._private.state import state as ray_state
from ray.exceptions import GetTimeoutError, RayError, RpcError

from megarl.cluster.on_node import live_nodes, on
from megarl.cluster.scan import Scan, StoppedProcess, kill_children

POLLS = 4  # looks within the time that a process may be stopped
START_S = 60.0  # for the first answer of a machine, which may be busy
AGAIN_S = 15.0  # at least, for that of a second actor on a machine whose first does not answer
CLOSE_S = 1.0  # for the thread to end
LEAVE_S = 5.0  # for all machines to end the run's actors
NOTICE_S, POLL_S = 20.0, 0.2  # how long Ray takes to notice that a node is lost; how often it is asked


class NodeScan:
    """`Scan` of Ray's processes on a machine, as an actor on that machine."""

    def __init__(self) -> None:
        self._scan = Scan(os.getppid())  # Ray's raylet, which starts all of them

    def stopped(self, longest_s: float, only: Collection[int] | None) -> list[StoppedProcess]:
        """See `Scan.stopped`."""
        return self._scan.stopped(longest_s, only)

    def end(self) -> None:
        """See `Scan.end`."""
        self._scan.end()

    def leave(self, pids: Collection[int]) -> None:
        """Kill these processes, if Ray's raylet has started them; then end this one, once the caller has its answer."""
        kill_children(os.getppid(), pids)
        threading.Timer(CLOSE_S, os._exit, (0,)).start()


@dataclass(frozen=True)
class Actors:
    """The run's living actors."""

    pids: Mapping[str, int] = field(default_factory=dict)  # by Ray's id of the actor
    members: Mapping[str, set[int]] = field(default_factory=dict)  # of an engine's further members, by the id of its actor
    at: Mapping[str, set[int]] = field(default_factory=dict)  # pids by Ray's id of the node
    addresses: Mapping[str, str] = field(default_factory=dict)  # of these nodes


@dataclass
class _Machine:
    """A machine that is asked one question at a time."""

    actor: Any
    patience_s: float  # how long the next answer may take
    second: bool = False  # the actor took the place of one that did not answer
    question: Any = None  # the reference of the answer that is waited for
    asked: float = 0.0  # when

    @property
    def late(self) -> bool:
        return self.question is not None and time.monotonic() - self.asked > self.patience_s


class Roster:
    """Asks Ray's server for the run's actors, and the machines that they are on for what is stopped there.

    Args:
        limit_s: how long a process may be stopped, and a machine not answer.
        here: Ray's id of a node that is scanned without asking; None: there is none.
        others: whether the cluster may also work for others, whose processes are left alone.
    """

    def __init__(self, limit_s: float, here: str | None, others: bool) -> None:
        self._limit_s, self._here, self._others = limit_s, here, others
        self._machines: dict[str, _Machine] = {}  # by Ray's id of the node
        self._stopped: dict[str, list[StoppedProcess]] = {}  # likewise
        self.actors = Actors()
        self._silent: dict[str, str] = {}  # what is wrong with the machines that do not answer, by Ray's id of the node
        self.answered = time.monotonic()  # when Ray's server did last
        self.failure: Exception | None = None  # that has ended the thread
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roster", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> list[StoppedProcess]:
        """What is stopped on the other machines."""
        return [one for processes in self._stopped.copy().values() for one in processes]

    @property
    def silent(self) -> list[tuple[set[int], str]]:
        """The machines that do not answer: the pids of the run's actors there, and what is wrong."""
        return [(self.actors.at.get(node, set()), why) for node, why in self._silent.copy().items()]

    def pids_of(self, actor: Any) -> set[int]:
        """The pids of an actor's process and of those of its members, actors named after it (`engines/member.py`); empty while they
        are not known."""
        identity, actors = actor._actor_id.hex(), self.actors
        own = {actors.pids[identity]} if identity in actors.pids else set()
        return own | actors.members.get(identity, set())

    def renew(self) -> None:
        """End what is stopped on the other machines, and forget what was seen.

        The peers of a lost node see broken connections at once, but Ray notices the loss some seconds later, and is waited for.
        """
        machines, stopped, silent = self._machines, self._stopped, set(self._silent)
        self._machines, self._stopped, self._silent = {}, {}, {}
        calls = {machines[node].actor.end.remote(): node for node, processes in stopped.items() if processes and node in machines}
        if calls:
            _, unanswered = ray.wait(list(calls), num_returns=len(calls), timeout=self._limit_s)
            silent |= {calls[call] for call in unanswered}
        deadline = time.monotonic() + NOTICE_S
        while silent & live_nodes().keys() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def end_actors(self) -> None:
        """In a cluster of others, end the run's actors without Ray's server: each machine's scan kills those there, and itself.

        It takes LEAVE_S at most.
        """
        if not self._others:
            return

        def end() -> None:
            machines, actors = self._machines.copy(), self.actors  # the other thread may be changing them
            calls = [machine.actor.leave.remote(actors.at.get(node, set())) for node, machine in machines.items()]
            if calls:
                ray.wait(calls, num_returns=len(calls), timeout=LEAVE_S)

        ending = threading.Thread(target=end, name="roster: the end", daemon=True)
        ending.start()
        ending.join(LEAVE_S)

    def close(self) -> None:
        """End the thread. If it waits for Ray, it ends with that, and asks nothing more."""
        self._ended.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._limit_s / POLLS):
                self._look()
        except Exception as error:
            if not self._ended.is_set():  # otherwise the session is ending
                self.failure = error

    def _look(self) -> None:
        machines, stopped = self._machines, self._stopped  # both are others after `renew`, and what is learned meanwhile is never read
        try:
            self.actors = _actors()
            self.answered = time.monotonic()
        except RpcError:  # Ray's server may be restarting
            return
        if self._ended.is_set():
            return
        actors = self.actors
        for node in list(machines):
            if node not in actors.at:  # it is lost, which Ray reports, or has nothing of the run any more
                machines.pop(node)
                stopped.pop(node, None)
        for node in actors.at:
            if node not in machines and node != self._here:
                machines[node] = _Machine(_scan_on(node), self._limit_s + START_S)
        self._question(machines, stopped, actors)

    def _question(self, machines: dict[str, _Machine], stopped: dict[str, list[StoppedProcess]], actors: Actors) -> None:
        """Ask all machines at the same time, and take the answers that are there within a part of the limit."""
        for node, machine in machines.items():
            if machine.question is None:
                machine.question = machine.actor.stopped.remote(self._limit_s, actors.at[node] if self._others else None)
                machine.asked = time.monotonic()
        waiting = [machine.question for machine in machines.values()]
        ready = ray.wait(waiting, num_returns=len(waiting), timeout=self._limit_s / POLLS)[0] if waiting else []
        for node, machine in list(machines.items()):
            try:
                if machine.question in ready:
                    stopped[node] = ray.get(machine.question)
                    machine.question, machine.patience_s, machine.second = None, self._limit_s, False
                elif machine.late:
                    raise GetTimeoutError
            except RayError as error:
                if not machine.second:  # it may be this actor alone that is stopped or has died
                    ray.kill(machine.actor)
                    machines[node] = _Machine(_scan_on(node), max(self._limit_s, AGAIN_S), second=True)
                elif machines is self._machines:
                    self._silent[node] = f"{actors.addresses[node]} does not answer within {self._limit_s:g} s ({type(error).__name__})"


def _scan_on(node: str) -> Any:
    """Start a `NodeScan`."""
    return ray.remote(NodeScan).options(**on(node)).remote()


def _actors() -> Actors:
    """Ask Ray's server. RpcError where it does not answer."""
    pids, members, at, addresses = dict[str, int](), dict[str, set[int]](), dict[str, set[int]](), dict[str, str]()
    for identity, actor in ray_state.actor_table(None, ray_worker.global_worker.current_job_id, "ALIVE").items():
        if actor["ActorClassName"] == NodeScan.__name__:
            continue
        address, pid = actor["Address"], int(actor["Pid"])
        pids[identity] = pid
        at.setdefault(address["NodeID"], set()).add(pid)
        addresses[address["NodeID"]] = address["IPAddress"]
        engine, separator, _ = actor["Name"].partition("/")
        if separator:
            members.setdefault(engine, set()).add(pid)
    return Actors(pids, members, at, addresses)
