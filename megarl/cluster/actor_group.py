"""Ray actors of one kind: calls on all of them, with waits that are bounded and name who is late or dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from megarl.cluster import watch

LOOK_S = 1.0  # how often what is watched is looked at
DEATH_S = 5.0  # how long to look for a dead actor once another one has failed
CANCEL_S = 10.0  # for calls that are not wanted any more


class WorkerDied(RuntimeError):
    """An actor's process is gone."""


class WorkerLate(RuntimeError):
    """An actor did not answer within its bound.

    Args:
        message: names it.
        seconds: how long it was waited for.
    """

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(frozen=True)
class ActorGroup:
    """Actors of one kind, in rank order."""

    kind: str
    actors: list[Any]

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The call on every actor with the same arguments; returns the references at once."""
        return [getattr(actor, method).remote(*args, **kwargs) for actor in self.actors]

    def start_each(self, method: str, first: Sequence[Any], *args: Any) -> list[Any]:
        """The call on every actor with an argument of its own; returns the references at once.

        Args:
            method: its name.
            first: the first argument, for each actor.
            *args: the others, for all.
        """
        return [getattr(actor, method).remote(own, *args) for actor, own in zip(self.actors, first, strict=True)]

    def wait(
        self, references: Sequence[Any], doing: str, timeout_s: float, helpers: Mapping[str, Sequence[Any]] | None = None
    ) -> list[Any]:
        """Waits for calls on all actors.

        Args:
            references: of one or several calls.
            doing: names the work in an error.
            timeout_s: for all of them together.
            helpers: further actors that take part in the work, by what they are called.

        Returns:
            The results, in the order of the references.

        Raises:
            WorkerDied: an actor is gone; any other exception is what the first failing actor raised.
            WorkerLate: no answer in time. Each names the actor.
            StandsStill: the session's watch has seen a process that is stopped, or a machine that does not answer.
        """
        names = {reference: f"{self.kind} {index % len(self.actors)}" for index, reference in enumerate(references)}
        pending, deadline = list(references), time.monotonic() + timeout_s
        results = dict[Any, Any]()
        while pending:
            remaining = deadline - time.monotonic()
            ready, pending = ray.wait(pending, timeout=min(max(0.0, remaining), LOOK_S))
            if ready and pending:  # each call looks at all that are pending: take those that have come with the first
                more, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
                ready += more
            watch.check(doing, {self.kind: self.actors, **(helpers or {})})
            if not ready and remaining <= 0:
                late = ", ".join(names[reference] for reference in pending)
                raise WorkerLate(f"{doing}: no answer within {timeout_s:g} s from {late}", timeout_s)
            for reference in ready:
                try:
                    results[reference] = ray.get(reference)
                except RayError as error:
                    self._raise_death(doing, error)
                    raise_cause(error, names[reference], doing)
        return [results[reference] for reference in references]

    def wait_each(self, calls: Mapping[int, Any], doing: str, timeout_s: float, failed: Callable[[int, Exception], None]) -> dict[int, Any]:
        """Waits for one call on each of some actors, whatever becomes of the others.

        Args:
            calls: a reference for each actor, by its number.
            doing: names the work in an error.
            timeout_s: for all of them together.
            failed: is told at once which actor has failed, and how: WorkerDied, WorkerLate, StandsStill, or what it raised. What `failed`
                raises ends the wait, and the calls that are left.

        Returns:
            The answers of the others.
        """
        answers, deadline = dict[int, Any](), time.monotonic() + timeout_s
        left = {reference: index for index, reference in calls.items()}
        try:
            while left:
                remaining = deadline - time.monotonic()
                ready, _ = ray.wait(list(left), timeout=min(max(0.0, remaining), LOOK_S))
                for reference in ready:
                    index = left.pop(reference)
                    try:
                        answers[index] = ray.get(reference)
                    except RayError as error:
                        failed(index, cause_of(error, f"{self.kind} {index}", doing))
                stopped: dict[int, Exception] = {**watch.still(doing, self.kind, self.actors)}
                if not ready and remaining <= 0:
                    late = f"{doing}: no answer within {timeout_s:g} s from {self.kind} "
                    stopped = {index: WorkerLate(f"{late}{index}", timeout_s) for index in left.values()}
                for reference, index in [*left.items()]:
                    if index in stopped:
                        del left[reference]
                        failed(index, stopped[index])
                watch.check(doing, {})
        except Exception:
            cancel(left)
            raise
        return answers

    def _raise_death(self, doing: str, error: RayError) -> None:
        """WorkerDied where an actor turns out to be gone: its neighbours see the broken connection sooner than Ray reports the death."""
        alive = {actor.__ray_ready__.remote(): f"{self.kind} {index}" for index, actor in enumerate(self.actors)}
        pending, deadline = list(alive), time.monotonic() + DEATH_S
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return  # busy, and so alive
            for reference in ready:
                try:
                    ray.get(reference)
                except ActorDiedError as death:
                    death.__cause__ = error
                    raise_cause(death, alive[reference], doing)
                except RayError:
                    continue  # not a death: the first error counts

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        """`start` and `wait`."""
        return self.wait(self.start(method, *args, **kwargs), method, timeout_s)


def raise_cause(error: RayError, name: str, doing: str) -> NoReturn:
    """Raises `cause_of` the error."""
    raise cause_of(error, name, doing) from error


def cause_of(error: RayError, name: str, doing: str) -> Exception:
    """What went wrong in an actor, in its own type, or WorkerDied or WorkerLate.

    Ray's wrapper of an actor's exception is an instance of that exception's class too, so it is looked at first.

    Args:
        error: what Ray raised.
        name: of the actor, for the message.
        doing: the work, for the message.
    """
    cause: Exception = error
    while isinstance(cause, RayTaskError):  # one wrapper for each actor that the exception went through
        cause = cause.cause
    if isinstance(cause, RayActorError):
        return WorkerDied(f"{doing}: {name} died ({str(cause).splitlines()[0]})")
    if isinstance(cause, GetTimeoutError):
        return WorkerLate(f"{doing}: no answer in time from {name}")
    cause.add_note(f"raised by {name} in {doing}")
    return cause


def task_fault(error: RayError, node: str, doing: str) -> Exception:
    """What went wrong in a task that must run on one node, in its own type, or WorkerDied.

    Args:
        error: what Ray raised.
        node: for the message.
        doing: the work, for the message.
    """
    if isinstance(error, RayTaskError):
        return cause_of(error, node, doing)
    return WorkerDied(f"{doing}: {node} was lost: {str(error).splitlines()[0]}")


def cancel(references: Iterable[Any]) -> None:
    """Ends calls whose results nobody waits for; where they have not ended after CANCEL_S, that is that."""
    left = list(references)
    for reference in left:
        ray.cancel(reference)
    if left:
        ray.wait(left, num_returns=len(left), timeout=CANCEL_S)


def end(actors: Iterable[Any]) -> None:
    """Ends the processes of actors, and what these have started."""
    for actor in actors:
        ray.kill(actor)
