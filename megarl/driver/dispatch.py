"""Dispatch of prompts to the engines, each to the least loaded one, and collection of the responses as they finish."""

import time
from collections import deque
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.cluster import watch
from megarl.cluster.actor_group import LOOK_S, ActorGroup, WorkerDied, WorkerLate, cancel, cause_of
from megarl.cluster.server import ProcessStalled
from megarl.config import RolloutSettings
from megarl.engines.engine import EngineDead, RolloutTimeout
from megarl.engines.episodes import Start
from megarl.engines.generate import Sampling
from megarl.engines.worker import ExpertsWanted, Playing, answered, ask, ask_more
from megarl.response import Response

ENGINE_FAULTS = (WorkerDied, WorkerLate, ProcessStalled, EngineDead, RolloutTimeout)  # faults of one engine that another would not have
AHEAD = 2  # an engine is given this many times the responses that it can work on at once, so that it never runs out of work
DOING = "generate"
POLL_S = 0.05


@dataclass(frozen=True)
class Segment:
    """A request for a limited number of further tokens instead of whole responses."""

    tokens: int  # largest number of further tokens per response
    open: Mapping[int, Sequence[Any]]  # the parts so far of each unfinished response, by its index


@dataclass(frozen=True)
class Wanted:
    """A request for the responses to one prompt, all of which come from one engine."""

    key: Hashable
    start: Start
    sampling: Sampling
    experts: ExpertsWanted | None = None
    segment: Segment | None = None

    @property
    def responses(self) -> int:
        """The number of responses requested."""
        return self.sampling.n if self.segment is None else len(self.segment.open)

    def ask(self, engine: Any, playing: Playing | None) -> list[Any]:
        """Start the call on `engine`; return at once, with a reference to each of its return values."""
        if self.segment is None:
            return ask(engine, [self.start], self.sampling, self.experts, playing)
        return ask_more(engine, self.start, self.sampling, self.experts, self.segment.tokens, self.segment.open)


@dataclass(frozen=True)
class _EngineCall:
    wanted: Wanted
    engine: int
    actor: Any  # the engine's actor when it was called
    references: list[Any]
    deadline: float


class NoEngine(Exception):
    """All engines are lost."""


class Dispatcher:
    """Dispatches the prompts of one piece of work. The other engines take over the work of an engine that is lost.

    `ask`, `finished` and the replacement of engines may run in three different threads, but each of them in only one.

    Args:
        group: the engines' actors.
        settings: the engines' settings.
        playing: how responses become episodes; None: they do not.
        starting: engines that get no work, because they have not started yet or lack the weights of the others. The code that starts them
            updates it.

    Attributes:
        busy_s: seconds in which an engine had work, summed over the engines.
    """

    def __init__(
        self, group: ActorGroup, settings: RolloutSettings, playing: Playing | None, starting: Container[int] = frozenset()
    ) -> None:
        self._group, self._settings, self._playing, self._starting = group, settings, playing, starting
        episodes, sequences = None if playing is None else playing.environment.concurrent, settings.dp * settings.max_num_seqs
        self._together = min(sequences, episodes or sequences)  # responses that an engine can work on at once
        self._queue: deque[Wanted] = deque()
        self._calls: dict[Any, _EngineCall] = {}  # by the reference that becomes ready with the responses
        self._lost: dict[int, tuple[Any, Exception]] = {}  # by engine: its actor when it was lost, and the fault
        self.busy_s, self._since = 0.0, time.monotonic()

    def ask(self, wanted: Wanted) -> None:
        """Append a prompt to the queue."""
        self._queue.append(wanted)

    @property
    def lost(self) -> dict[int, Exception]:
        """The engines that are lost and not yet replaced, each with its fault."""
        return {engine: fault for engine, (actor, fault) in self._lost.copy().items() if actor is self._group.actors[engine]}

    @property
    def open(self) -> int:
        """The number of unfinished prompts."""
        return len(self._queue) + len(self._calls)

    def finished(self, longest_s: float = LOOK_S) -> dict[Any, list[Response]]:
        """Return the responses to the prompts that have finished, by key; wait for the first one, but no longer than `longest_s`.

        Raises an engine's error if any other engine would fail in the same way, and NoEngine if no engine is left.
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
        answers = {}
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
                answers[call.wanted.key] = answered(responses, call.references[1:], call.wanted.experts)
        actors = list(self._group.actors)
        for engine, fault in watch.still(DOING, self._group.kind, actors).items():
            self._lose(engine, actors[engine], fault)
        for call in [one for one in self._calls.values() if time.monotonic() > one.deadline]:
            limit_s = self._settings.timeout_s
            late = f"{DOING}: no answer within {limit_s:g} s from {self._group.kind} {call.engine}"
            self._lose(call.engine, call.actor, WorkerLate(late, limit_s))
        watch.check(DOING, {})
        return answers

    def cancel(self) -> None:
        """Cancel all unfinished work."""
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
        """Record an engine as lost and requeue its actor's unfinished calls. Raise a fault that another engine would also have."""
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
