"""Ray actors of one kind: calls on all of them, with waits that are bounded and name who is late or dead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from megarl.cluster import watch

LOOK_S = 1.0  # how often what is watched is looked at
DEATH_S = 5.0  # how long to look for a dead actor once another one has failed


class WorkerDied(RuntimeError):
    """An actor's process is gone."""


class WorkerLate(RuntimeError):
    """An actor did not answer within its bound."""


@dataclass(frozen=True)
class ActorGroup:
    """Actors of one kind, in rank order."""

    kind: str
    actors: Sequence[Any]

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The call on every actor with the same arguments; returns the references at once."""
        return [getattr(actor, method).remote(*args, **kwargs) for actor in self.actors]

    def wait(self, references: Sequence[Any], doing: str, timeout_s: float) -> list[Any]:
        """Waits for calls on all actors.

        Args:
            references: of one or several calls.
            doing: names the work in an error.
            timeout_s: for all of them together.

        Returns:
            The results, in the order of the references.

        Raises:
            WorkerDied: an actor is gone; any other exception is what the first failing actor raised.
            WorkerLate: no answer in time. Each names the actor.
            StandsStill: the session's watch has seen a process that is stopped, or a machine that does not answer.
        """
        names = {reference: f"{self.kind} {index % len(self.actors)}" for index, reference in enumerate(references)}
        pending, deadline = list(references), time.monotonic() + timeout_s
        while pending:
            remaining = deadline - time.monotonic()
            ready, pending = ray.wait(pending, timeout=min(max(0.0, remaining), LOOK_S))
            watch.check(doing, self.kind, self.actors)
            if not ready and remaining <= 0:
                late = ", ".join(names[reference] for reference in pending)
                raise WorkerLate(f"{doing}: no answer within {timeout_s:g} s from {late}")
            for reference in ready:
                try:
                    ray.get(reference)
                except RayError as error:
                    self._raise_death(doing, error)
                    raise_cause(error, names[reference], doing)
        return ray.get(list(references))

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
    """Raises what went wrong in an actor, in its own type, or WorkerDied or WorkerLate.

    Ray's wrapper of an actor's exception is an instance of that exception's class too, so it is looked at first.

    Args:
        error: what Ray raised.
        name: of the actor, for the message.
        doing: the work, for the message.
    """
    cause: BaseException = error
    while isinstance(cause, RayTaskError):  # one wrapper for each actor that the exception went through
        cause = cause.cause
    if isinstance(cause, RayActorError):
        raise WorkerDied(f"{doing}: {name} died ({str(cause).splitlines()[0]})") from error
    if isinstance(cause, GetTimeoutError):
        raise WorkerLate(f"{doing}: no answer in time from {name}") from error
    cause.add_note(f"raised by {name} in {doing}")
    raise cause from error
