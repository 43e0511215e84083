"""Hands prompts to the engines, each to the one that has least to do, and takes the responses as they are finished."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.cluster import watch
from megarl.cluster.actor_group import LOOK_S, ActorGroup, WorkerDied, WorkerLate, cancel, cause_of
from megarl.cluster.watch import StandsStill
from megarl.config import RolloutSettings
from megarl.response import Response
from megarl.rollout.engine import EngineDead, RolloutTimeout
from megarl.rollout.episodes import Start
from megarl.rollout.generate import Sampling
from megarl.workers.rollout_worker import ExpertsWanted, Playing, answered, ask, ask_more

ENGINE_FAULTS = (WorkerDied, WorkerLate, StandsStill, EngineDead, RolloutTimeout)  # faults of one engine, which another would not have
AHEAD = 2  # how many times as many responses as it can work on an engine is given at once, so that it never runs out of work
DOING = "generate"
POLL_S = 0.05


@dataclass(frozen=True)
class Segment:
    """Some tokens more, and no whole responses."""

    tokens: int  # of each response, at most
    open: Mapping[int, Sequence[Any]]  # of each response that is not done the parts that there are, by its index


@dataclass(frozen=True)
class Wanted:
    """The responses to one prompt: one engine gives all of them."""

    key: Hashable
    start: Start
    sampling: Sampling
    experts: ExpertsWanted | None = None
    segment: Segment | None = None

    @property
    def responses(self) -> int:
        """How many."""
        return self.sampling.n if self.segment is None else len(self.segment.open)

    def ask(self, engine: Any, playing: Playing | None) -> list[Any]:
        """Starts the call; returns at once, with references to all that it returns."""
        if self.segment is None:
            return ask(engine, [self.start], self.sampling, self.experts, playing)
        return ask_more(engine, self.start, self.sampling, self.experts, self.segment.tokens, self.segment.open)


@dataclass(frozen=True)
class _EngineCall:
    wanted: Wanted
    engine: int
    actor: Any  # that the engine was
    references: list[Any]
    deadline: float


class NoEngine(Exception):
    """All engines are lost."""


class Dispatcher:
    """The prompts of one piece of work. What an engine that is lost had to do, the others do.

    `ask`, `finished` and the replacement of engines may run in three threads; each of them in one alone.

    Args:
        group: the engines' actors.
        settings: of the engines.
        playing: how responses become episodes, if they do.
        starting: engines that are not asked: they have not started, or have not the weights of the others. Whoever starts them changes it.

    Attributes:
        busy_s: seconds in which engines had something to do, added up.
    """

    def __init__(
        self, group: ActorGroup, settings: RolloutSettings, playing: Playing | None, starting: Container[int] = frozenset()
    ) -> None:
        self._group, self._settings, self._playing, self._starting = group, settings, playing, starting
        episodes = None if playing is None else playing.environment.max_concurrent
        self._together = min(settings.max_num_seqs, episodes or settings.max_num_seqs)  # responses that an engine works on at a time
        self._queue: deque[Wanted] = deque()
        self._calls: dict[Any, _EngineCall] = {}  # by the reference that is ready when the responses are
        self._lost: dict[int, tuple[Any, Exception]] = {}  # engines with the actors that they were
        self.busy_s, self._since = 0.0, time.monotonic()

    def ask(self, wanted: Wanted) -> None:
        """Queues a prompt behind those that wait."""
        self._queue.append(wanted)

    @property
    def lost(self) -> dict[int, Exception]:
        """The engines that are, and how; one that is replaced is so no longer."""
        return {engine: fault for engine, (actor, fault) in self._lost.copy().items() if actor is self._group.actors[engine]}

    @property
    def open(self) -> int:
        """How many prompts are not finished."""
        return len(self._queue) + len(self._calls)

    def finished(self, longest_s: float = LOOK_S) -> dict[Any, list[Response]]:
        """The responses to prompts that are finished; waits for the first, but no longer than `longest_s`.

        Raises an engine's error where any other engine would fail in the same way. NoEngine where none is left.
        """
        self._hand_out()
        self._charge()
        ready: list[Any] = []
        if self._calls:
            ready, _ = ray.wait(list(self._calls), timeout=longest_s)
        else:  # an engine is starting
            time.sleep(min(POLL_S, longest_s))
        more, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0) if ready else ([], [])
        self._charge()
        found = {}
        for reference in dict.fromkeys([*ready, *more]):
            if reference not in self._calls:
                continue  # its engine is lost
            call = self._calls[reference]
            try:
                responses = ray.get(reference)
            except RayError as error:
                self._lose(call.engine, call.actor, cause_of(error, f"{self._group.kind} {call.engine}", DOING))
            else:
                del self._calls[reference]
                found[call.wanted.key] = answered(responses, call.references[1:], call.wanted.experts)
        actors = list(self._group.actors)
        for engine, fault in watch.still(DOING, self._group.kind, actors).items():
            self._lose(engine, actors[engine], fault)
        for call in [one for one in self._calls.values() if time.monotonic() > one.deadline]:
            limit_s = self._settings.timeout_s
            late = f"{DOING}: no answer within {limit_s:g} s from {self._group.kind} {call.engine}"
            self._lose(call.engine, call.actor, WorkerLate(late, limit_s))
        watch.check(DOING, {})
        return found

    def cancel(self) -> None:
        """Nothing of it is wanted any more."""
        self._queue.clear()
        cancel(self._calls)
        self._calls.clear()

    def _hand_out(self) -> None:
        actors, lost = list(self._group.actors), self.lost
        if self._queue and len(lost) == len(actors):
            raise NoEngine
        load = {engine: 0 for engine in range(len(actors)) if engine not in lost and engine not in self._starting}
        for call in self._calls.values():
            if call.engine in load and call.actor is actors[call.engine]:
                load[call.engine] += call.wanted.responses
        while self._queue and load:
            engine = min(load, key=load.__getitem__)
            if load[engine] >= AHEAD * self._together:
                return
            wanted = self._queue.popleft()
            load[engine] += wanted.responses
            references = wanted.ask(actors[engine], self._playing)
            self._calls[references[0]] = _EngineCall(
                wanted, engine, actors[engine], references, time.monotonic() + self._settings.timeout_s
            )

    def _lose(self, engine: int, actor: Any, fault: Exception) -> None:
        """The unfinished calls of this actor wait again. Raises a fault that another engine would not do without."""
        if not isinstance(fault, ENGINE_FAULTS):
            raise fault
        if engine not in self.lost:
            self._lost[engine] = actor, fault
        back = {reference: call for reference, call in self._calls.items() if call.actor is actor}
        for reference in back:
            del self._calls[reference]
        self._queue.extendleft(call.wanted for call in reversed(back.values()))

    def _charge(self) -> None:
        now = time.monotonic()
        self.busy_s += (now - self._since) * len({call.engine for call in self._calls.values()})
        self._since = now
