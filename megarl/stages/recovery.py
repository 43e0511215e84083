"""A run goes on after its ranks have failed: they start again, and it goes back to the last step that is copied or saved."""

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
    """Faults that restarting the ranks may cure. Any other would come back."""
    from megarl.parallel.grid import FAULTS

    return WorkerDied, WorkerLate, StandsStill, ObjectLostError, ContentLost, *FAULTS


class Context(Protocol):
    """What the work of a run is done with."""

    @property
    def run(self) -> Run: ...

    @property
    def restarts(self) -> Restarts: ...

    @property
    def copies(self) -> Copies: ...

    @property
    def machines(self) -> Collection[str]:
        """Ray's ids of the nodes that its ranks are on."""

    @property
    def timeout_s(self) -> float:
        """Of the longest wait."""

    def restart(self, beginning: bool, /) -> bool:
        """Starts the ranks again. `beginning`: the models are as they were at the start; else their weights are loaded next.

        Returns whether a node was gone.
        """


Find = Callable[[Collection[Path]], ResumePoint | None]


def recovering(work: Callable[[ResumePoint | None], None], resume: ResumePoint | None, ctx: Context, find: Find) -> None:
    """Does the work of a run to its end, however often its ranks fail, as far as `cluster.restarts` allows.

    A failure while they start again is one more. SIGTERM ends the run then, at the next wait: there is nothing to be saved.

    Args:
        work: from a checkpoint, or from the beginning, with ranks that have just started.
        resume: where it begins.
        ctx: what it is done with.
        find: the newest checkpoint, if there is any but those in given step directories.
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
    """The checkpoint, if every byte of it is as it was written, or the newest before it of which that is true; all machines read.

    Args:
        resume: the checkpoint; a copy in memory is taken as it is.
        ctx: of the run.
        find: see `recovering`.

    Raises:
        ConfigError: as `find` raises it, where there is none.
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
    """Where a run that has just been opened to go on does so."""
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
        termination.poll()  # before it is told that the run goes on
    return resume


def newer(copied: tuple[int, Any] | None, find: Find, damaged: Collection[Path]) -> ResumePoint | None:
    """The copy in memory or the newest checkpoint, whichever is of the later step: a copy may have found no room for many steps.

    Args:
        copied: the copy's step and its record; None where there is none.
        find: see `recovering`.
        damaged: step directories that do not count.
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
    """Finds what the run itself has saved; what was there before it, and was not to be gone on with, lies elsewhere by now.

    Args:
        config: of the run.
        verb: that the run is of.
        items: how many it learns from.
    """
    own = config.model_copy(update={"save": config.save.model_copy(update={"resume": True})})
    return lambda damaged: resume_point(own, verb, items, damaged)
