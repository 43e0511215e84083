"""Hands prompts to the engines, each to the one that has least to do, and takes the responses as they are finished."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.cluster import watch
from megarl.cluster.actor_group import LOOK_S, ActorGroup, WorkerDied, WorkerLate, cancel, cause_of
from megarl.cluster.watch import StandsStill
from megarl.config import RolloutSettings
from megarl.rollout.engine import EngineDead, RolloutTimeout
from megarl.rollout.episodes import Start
from megarl.rollout.generate import Sampling
from megarl.workers.rollout_worker import ExpertsWanted, Playing, Response, answered, ask, ask_more

LOST = (WorkerDied, WorkerLate, StandsStill, EngineDead, RolloutTimeout)  # what another engine would do without
AHEAD = 2  # times rollout.max_num_seqs: an engine has so many responses to give, that it need not wait for more
DOING = "generate"


@dataclass(frozen=True)
class Segment:
    """Some tokens more, and no whole responses."""

    tokens: int  # of each response, at most
    open: Mapping[int, Any]  # the payload of each response that is not done, by its index; None where it begins


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
class _Call:
    wanted: Wanted
    engine: int
    references: list[Any]
    deadline: float


class NoEngine(Exception):
    """All engines are lost."""


class Dispatcher:
    """The prompts of one piece of work. What an engine that is lost had to do, the others do.

    Args:
        group: the engines' actors.
        settings: of the engines.
        playing: how responses become episodes, if they do.

    Attributes:
        lost: engines that are, and how; one that is replaced takes part again.
        busy_s: seconds in which engines had something to do, added up.
    """

    def __init__(self, group: ActorGroup, settings: RolloutSettings, playing: Playing | None) -> None:
        self._group, self._settings, self._playing = group, settings, playing
        self._queue: deque[Wanted] = deque()
        self._calls: dict[Any, _Call] = {}  # by the reference that is ready when the responses are
        self._dead: dict[int, Any] = {}  # the actors that they were
        self.lost: dict[int, Exception] = {}
        self.busy_s, self._since = 0.0, time.monotonic()

    def ask(self, wanted: Wanted) -> None:
        """Queues a prompt behind those that wait."""
        self._queue.append(wanted)

    @property
    def open(self) -> int:
        """How many prompts are not finished."""
        return len(self._queue) + len(self._calls)

    def finished(self, longest_s: float = LOOK_S) -> dict[Any, list[Response]]:
        """The responses to prompts that are finished; waits for the first, but no longer than `longest_s`.

        What an engine raises that no other would do without is raised. NoEngine where none is left.
        """
        self._hand_out()
        self._charge()
        ready, _ = ray.wait(list(self._calls), timeout=longest_s) if self._calls else ([], [])
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
                self._lose(call.engine, cause_of(error, f"{self._group.kind} {call.engine}", DOING))
            else:
                del self._calls[reference]
                found[call.wanted.key] = answered(responses, call.references[1:], call.wanted.experts)
        for engine, fault in watch.still(DOING, self._group.kind, self._group.actors).items():
            self._lose(engine, fault)
        for call in [one for one in self._calls.values() if time.monotonic() > one.deadline]:
            limit_s = self._settings.timeout_s
            self._lose(call.engine, WorkerLate(f"{DOING}: no answer within {limit_s:g} s from {self._group.kind} {call.engine}", limit_s))
        watch.check(DOING, {})
        return found

    def cancel(self) -> None:
        """Nothing of it is wanted any more."""
        self._queue.clear()
        cancel(self._calls)
        self._calls.clear()

    def _hand_out(self) -> None:
        actors = self._group.actors
        self.lost = {engine: fault for engine, fault in self.lost.items() if actors[engine] is self._dead[engine]}  # others are replaced
        living = [engine for engine in range(len(actors)) if engine not in self.lost]
        if self._queue and not living:
            raise NoEngine
        load = dict.fromkeys(living, 0)
        for call in self._calls.values():
            load[call.engine] += call.wanted.responses
        while self._queue:
            engine = min(living, key=load.__getitem__)
            if load[engine] >= AHEAD * self._settings.max_num_seqs:
                return
            wanted = self._queue.popleft()
            load[engine] += wanted.responses
            references = wanted.ask(actors[engine], self._playing)
            self._calls[references[0]] = _Call(wanted, engine, references, time.monotonic() + self._settings.timeout_s)

    def _lose(self, engine: int, fault: Exception) -> None:
        if not isinstance(fault, LOST):
            raise fault
        if engine in self.lost:
            return
        self.lost[engine], self._dead[engine] = fault, self._group.actors[engine]
        back = {reference: call for reference, call in self._calls.items() if call.engine == engine}
        for reference in back:
            del self._calls[reference]
        self._queue.extendleft(call.wanted for call in reversed(back.values()))

    def _charge(self) -> None:
        now = time.monotonic()
        self.busy_s += (now - self._since) * len({call.engine for call in self._calls.values()})
        self._since = now
