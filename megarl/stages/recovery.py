"""Recovery from failed ranks: they are restarted, and the run goes back to the last step that was copied or saved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import ObjectLostError

from megarl import termination
from megarl.cluster import watch
from megarl.cluster.actor_group import WorkerDied, WorkerLate
from megarl.cluster.hashing import damaged_anywhere
from megarl.cluster.watch import StandsStill
from megarl.config import ConfigError, TrainingSettings
from megarl.errors import ContentLost
from megarl.observe.run import Run
from megarl.restarts import Restarts
from megarl.stages.saving import ResumePoint, passed_over, resume_point
from megarl.workers.copies import Copies


def curable() -> tuple[type[Exception], ...]:
    """The errors that restarting the ranks may cure. Any other would recur."""
    from megarl.parallel.grid import FAULTS

    return WorkerDied, WorkerLate, StandsStill, ObjectLostError, ContentLost, *FAULTS


class Context(Protocol):
    """The parts of a run that recovery needs."""

    @property
    def run(self) -> Run: ...

    @property
    def restarts(self) -> Restarts: ...

    @property
    def copies(self) -> Copies: ...

    @property
    def machines(self) -> Collection[str]:
        """Ray's ids of the nodes on which the run's ranks are."""

    @property
    def timeout_s(self) -> float:
        """The longest time to wait for the ranks."""

    def restart(self, beginning: bool, /) -> bool:
        """Restart the ranks, with the initial models if `beginning`, else for weights to be loaded next.

        Returns whether a node was lost.
        """


Find = Callable[[Collection[Path]], ResumePoint | None]


def recovering(work: Callable[[ResumePoint | None], None], resume: ResumePoint | None, ctx: Context, find: Find) -> None:
    """Do the work of a run to the end, however often its ranks fail, as far as `cluster.restarts` allows.

    A failure during a restart counts as another one. During a restart, SIGTERM ends the run at the next wait: there is nothing to save.

    Args:
        work: does the work from a checkpoint, or from the beginning, with newly started ranks.
        resume: where to start; None: from the beginning.
        ctx: the run's context.
        find: returns the newest checkpoint outside the given step directories, if there is one.
    """
    fault: Exception | None = None
    while True:
        try:
            with termination.polled():
                if fault is not None:
                    resume = _recovered(fault, ctx, find)
                elif resume is not None:
                    resume = _verified(resume, ctx, find)
            work(resume)
            return
        except curable() as error:
            if _ray_is_gone(error):
                raise
            number = termination.asked()
            if number is not None:
                saved = "started again, the run resumes from what it has saved"
                raise termination.Terminated(number, f", after {error}; {saved}") from error
            if not ctx.restarts.allow(error):
                raise
            fault = error


def _ray_is_gone(fault: Exception) -> bool:
    try:
        watch.check("recovery", {})
    except StandsStill as error:
        fault = error
    return isinstance(fault, StandsStill) and fault.session


def intact(resume: ResumePoint, ctx: Context, find: Find) -> ResumePoint:
    """Return the checkpoint if every byte of it is intact, else the newest intact one before it. All machines share the reading.

    Args:
        resume: the checkpoint; a copy in memory is not checked.
        ctx: the run's context.
        find: see `recovering`.

    Raises:
        ConfigError: none is intact (raised by `find`).
    """
    damaged = set[Path]()
    while resume.copy is None:
        whole = {step.path: step for step in resume.steps.values()}
        files = {path: record for step in whole.values() for path, record in step.files.items()}
        found = damaged_anywhere(files, ctx.machines, ctx.timeout_s, lambda done, of: ctx.run.progress("verify, MB", done >> 20, of >> 20))
        if not found:
            break
        for path, fault in sorted(found.items()):
            [step] = [step for step in whole if path.is_relative_to(step)]
            passed_over(step, f"{path.relative_to(step)}: {fault}")
            damaged.add(step)
        before = find(damaged)
        assert before is not None, "where some are damaged and none is whole, it raises"
        resume = before
    return resume


def _verified(resume: ResumePoint, ctx: Context, find: Find) -> ResumePoint:
    """Return the intact checkpoint from which a newly opened run resumes, after rewinding the run to it."""
    with ctx.run.phase("verify"):
        found = intact(resume, ctx, find)
    if found is not resume:
        ctx.run.rewind(found.run)
    return found


def _recovered(fault: Exception, ctx: Context, find: Find) -> ResumePoint | None:
    with ctx.restarts.recovery("rank", fault) as told, ctx.run.phase("recovery"):
        newest_of = partial(newer, ctx.copies.newest(), find)
        resume = newest_of(())
        if resume is not None:
            resume = intact(resume, ctx, newest_of)
        told.lost_steps = ctx.run.rewind(None if resume is None else resume.run)
        if resume is None:
            ctx.run.note("nothing is saved yet: the run starts over")
        watch.renew()
        if ctx.restart(resume is None):
            told.kind = "node"
        termination.poll()  # before reporting that the run resumes
    return resume


def newer(copied: tuple[int, Any] | None, find: Find, damaged: Collection[Path]) -> ResumePoint | None:
    """Return the copy in memory or the newest checkpoint, whichever has the later step.

    The copy may be the older one, since there may have been no room for copies for many steps.

    Args:
        copied: the copy's step and its record; None if there is none.
        find: see `recovering`.
        damaged: step directories to ignore.
    """
    if copied is None:
        return find(damaged)
    copy = ResumePoint({}, **copied[1], copy=copied[0])
    try:
        saved = find(damaged)
    except ConfigError:  # all of them are damaged
        return copy
    return saved if saved is not None and saved.progress["step"] > copied[0] else copy


def newest(config: TrainingSettings, verb: str, items: int) -> Find:
    """Return a function that finds the newest checkpoint of this run, even if `save.resume` is off.

    Earlier checkpoints that the run was not to resume from have been moved away by now.

    Args:
        config: the run's configuration.
        verb: the run's verb.
        items: number of its training items.
    """
    own = config.model_copy(update={"save": config.save.model_copy(update={"resume": True})})
    return lambda damaged: resume_point(own, verb, items, damaged)
