"""Groups of Ray actors of one kind: calls on all of them, with bounded waits that name the actor that is late or dead."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from megarl.cluster import watch
from megarl.cluster.server import ask

LOOK_S = 1.0  # how often a wait checks the watch
DEATH_S = 5.0  # how long to look for a dead actor once another has failed
NODE_DEATH_S = 30.0  # the same where a connection was lost, perhaps with a whole node: Ray reports that after some 15 s (session.HEALTH)
# How gloo reports a connection whose other end is gone; NCCL's errors have a type of their own (torch's DistError).
LOST_CONNECTION = re.compile(r"/gloo/transport/\S+\] (?!Timed out)(?P<what>.*)")
AGAIN_S = 0.2  # between two questions to an actor to which Ray has lost its connection
CANCEL_S = 10.0  # how long to wait for cancelled calls to end


class WorkerDied(RuntimeError):
    """An actor's process is gone."""


class WorkerLate(RuntimeError):
    """An actor did not answer within its bound.

    Args:
        message: names the actor.
        seconds: how long the caller waited for it.
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
        """Call a method on every actor with the same arguments, and return the references at once."""
        return [getattr(actor, method).remote(*args, **kwargs) for actor in self.actors]

    def start_each(self, method: str, first: Sequence[Any], *args: Any) -> list[Any]:
        """Call a method on every actor with a first argument of its own, and return the references at once.

        Args:
            method: its name.
            first: the first argument for each actor.
            *args: the remaining arguments, the same for all.
        """
        return [getattr(actor, method).remote(own, *args) for actor, own in zip(self.actors, first, strict=True)]

    def wait(
        self, references: Sequence[Any], doing: str, timeout_s: float, helpers: Mapping[str, Sequence[Any]] | None = None
    ) -> list[Any]:
        """Wait for calls on all actors.

        Args:
            references: the references of one or several calls on all actors.
            doing: names the work in an error.
            timeout_s: for all of them together.
            helpers: further actors that take part in the work, by the name of their kind.

        Returns:
            The results, in the order of the references.

        Raises:
            WorkerDied: an actor's process is gone. Any other exception is what the first failing actor raised.
            WorkerLate: an actor did not answer in time. Every error names the actor.
            ProcessStalled: the session's watch has seen a stopped process, or a machine that does not answer.
        """
        names = {reference: f"{self.kind} {index % len(self.actors)}" for index, reference in enumerate(references)}
        pending, deadline = list(references), time.monotonic() + timeout_s
        results = dict[Any, Any]()
        while pending:
            remaining = deadline - time.monotonic()
            ready, pending = ray.wait(pending, timeout=min(max(0.0, remaining), LOOK_S))
            if ready and pending:  # ray.wait scans all pending references: take every ready one at once
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
        """Wait for one call on each of some actors, even if others fail.

        Args:
            calls: the reference of each actor's call, by the actor's number.
            doing: names the work in an error.
            timeout_s: for all of them together.
            failed: called at once with the number of an actor that has failed, and the error: WorkerDied, WorkerLate, ProcessStalled, or
                what the actor raised. If `failed` itself raises, the wait ends and the remaining calls are cancelled.

        Returns:
            The answers of the actors that did not fail, by number.
        """
        answers, deadline = dict[int, Any](), time.monotonic() + timeout_s
        pending = {reference: index for index, reference in calls.items()}
        try:
            while pending:
                remaining = deadline - time.monotonic()
                ready, _ = ray.wait(list(pending), timeout=min(max(0.0, remaining), LOOK_S))
                stopped: dict[int, Exception] = {**watch.still(doing, self.kind, self.actors)}
                if not ready and remaining <= 0:
                    late = f"{doing}: no answer within {timeout_s:g} s from {self.kind} "
                    stopped = {index: WorkerLate(f"{late}{index}", timeout_s) for index in pending.values()}
                for reference, index in [*pending.items()]:
                    if index in stopped:  # even if it has answered: what it has started may be stopped
                        del pending[reference]
                        failed(index, stopped[index])
                for reference in [one for one in ready if one in pending]:
                    index = pending.pop(reference)
                    try:
                        answers[index] = ray.get(reference)
                    except RayError as error:
                        failed(index, cause_of(error, f"{self.kind} {index}", doing))
                watch.check(doing, {})
        except Exception:
            cancel(pending)
            raise
        return answers

    def _raise_death(self, doing: str, error: RayError) -> None:
        """Raise WorkerDied if an actor turns out to be gone: its peers see the broken connection before Ray reports the death."""
        pending = {actor.__ray_ready__.remote(): index for index, actor in enumerate(self.actors)}
        deadline = time.monotonic() + (NODE_DEATH_S if LOST_CONNECTION.search(str(error)) else DEATH_S)
        while pending and time.monotonic() < deadline:
            ready, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return  # the rest are busy, so they are alive
            for reference in ready:
                index = pending.pop(reference)
                try:
                    ray.get(reference)
                except ActorDiedError as death:
                    death.__cause__ = error
                    raise_cause(death, f"{self.kind} {index}", doing)
                except ActorUnavailableError:  # Ray, too, has lost its connection, and does not know yet whether the process is gone
                    time.sleep(AGAIN_S)
                    pending[self.actors[index].__ray_ready__.remote()] = index
                except RayError:
                    continue  # not a death: the first error counts

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        """Call a method on every actor with `start`, and return the results of `wait`."""
        return self.wait(self.start(method, *args, **kwargs), method, timeout_s)


def raise_cause(error: RayError, name: str, doing: str) -> NoReturn:
    """Raise the `cause_of` an error."""
    raise cause_of(error, name, doing) from error


def cause_of(error: RayError, name: str, doing: str) -> Exception:
    """Return the exception that an actor raised, in its own type, or WorkerDied or WorkerLate.

    An error of gloo that tells of a lost connection is a death, too: the other end's, which may be on a node of which Ray has no news yet.
    Ray's wrapper of an actor's exception is also an instance of that exception's class, so the wrapper is checked for first. An actor's
    death inside a wrapper is that of another one, which the first has called.

    Args:
        error: what Ray raised.
        name: the actor's name, for the message.
        doing: the work, for the message.
    """
    cause: Exception = error
    while isinstance(cause, RayTaskError):  # one wrapper for each actor that the exception passed through
        cause = cause.cause
    kind = re.search(r"class_name: (\S+)", str(cause))
    who = name if cause is error else f"the {kind[1] if kind else 'process'} that {name} has called"
    if isinstance(cause, RayActorError):
        return WorkerDied(f"{doing}: {who} died ({str(cause).splitlines()[0]})")
    if isinstance(cause, GetTimeoutError):
        return WorkerLate(f"{doing}: no answer in time from {who}")
    if match := LOST_CONNECTION.search(str(cause)):
        return WorkerDied(f"{doing}: {name} has lost a process with which it computes ({match['what']})")
    cause.add_note(f"raised by {name} in {doing}")
    return cause


def task_fault(error: RayError, node: str, doing: str) -> Exception:
    """Return the exception of a task that must run on one node, in its own type, or WorkerDied.

    Args:
        error: what Ray raised.
        node: the node's name, for the message.
        doing: the work, for the message.
    """
    if isinstance(error, RayTaskError):
        return cause_of(error, node, doing)
    return WorkerDied(f"{doing}: {node} was lost: {str(error).splitlines()[0]}")


def cancel(references: Iterable[Any]) -> None:
    """Cancel calls whose results nobody waits for; give up on any that have not ended after CANCEL_S."""
    pending = list(references)
    for reference in pending:
        ray.cancel(reference)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=CANCEL_S)


def end(actors: Iterable[Any]) -> None:
    """Kill the processes of actors, and those that these have started. Raises ProcessStalled where Ray's server does not answer."""
    for actor in actors:
        ask("ending processes", partial(ray.kill, actor))
