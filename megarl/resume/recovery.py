"""Recovery from failed ranks: they are restarted, and the run goes back to the last step that was copied or saved."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray.exceptions import ObjectLostError

from megarl.checkpoints.step_writer import mark_damaged
from megarl.checkpoints.steps import damaged
from megarl.cluster import watch
from megarl.cluster.actor_group import WorkerDied, WorkerLate
from megarl.cluster.server import ProcessStalled, is_loss
from megarl.config import ConfigError, TrainingSettings
from megarl.errors import ContentLost, DamagedFile, naming_files
from megarl.host import termination
from megarl.observe.restarts import Restarts
from megarl.observe.run import Run
from megarl.resume.copies import Copies
from megarl.resume.point import ResumePoint, resume_point


def recoverable_errors() -> tuple[type[Exception], ...]:
    """The errors that restarting the ranks may cure. Any other would recur."""
    from megarl.parallel.grid import FAULTS

    return WorkerDied, WorkerLate, ProcessStalled, ObjectLostError, ContentLost, *FAULTS


@dataclass(frozen=True)
class Recoverable:
    """The parts of a run that recovery needs."""

    run: Run
    restarts: Restarts
    copies: Copies
    restart: Callable[[bool], bool]
    """Restarts the ranks: with the initial models if its argument is true, else for weights to be loaded next. Returns whether a node was
    lost."""


Find = Callable[[], ResumePoint | None]


def recovering(work: Callable[[ResumePoint | None], None], resume: ResumePoint | None, parts: Recoverable, find: Find) -> None:
    """Do the work of a run to the end, however often its ranks fail, as far as `cluster.restarts` allows.

    A failure during a restart counts as another one. During a restart, SIGTERM ends the run at the next wait: there is nothing to save.
    A checkpoint of which the ranks find a damaged file is marked and skipped, which is no failure.

    Args:
        work: does the work from a checkpoint, or from the beginning, with newly started ranks.
        resume: where to start; None: from the beginning.
        parts: the parts of the run that recovery needs.
        find: returns the newest checkpoint that is not known to be damaged, if there is one.
    """
    fault: Exception | None = None
    while True:
        try:
            with termination.polled():
                if fault is not None:
                    resume = _recovered(fault, parts, find)
            work(resume)
            return
        except DamagedFile as error:
            resume, fault = _previous_checkpoint(error, resume, parts, find), None
        except recoverable_errors() as error:
            if _ray_is_gone(error):
                raise
            number = termination.asked()
            if number is not None:
                saved = "started again, the run resumes from what it has saved"
                raise termination.Terminated(number, f", after {error}; {saved}") from error
            if not parts.restarts.allow(error):
                raise
            fault = error


def _ray_is_gone(fault: Exception) -> bool:
    try:
        watch.check("recovery", {})
    except ProcessStalled as error:
        fault = error
    return is_loss(fault)


def _previous_checkpoint(error: DamagedFile, resume: ResumePoint | None, parts: Recoverable, find: Find) -> ResumePoint:
    """Return the checkpoint before one of which a file is damaged, after rewinding the run to it.

    The metrics after it are lost, so the damaged one is marked: another start of the run could not go on from it either.

    Args:
        error: names the file.
        resume: the checkpoint that was being loaded.
        parts: the parts of the run that recovery needs.
        find: see `recovering`.

    Raises:
        DamagedFile: the file is of no checkpoint, or intact if read on this machine.
        ConfigError: no checkpoint is left (raised by `find`).
    """
    file = Path(error.file)
    step = next((step for step in ({} if resume is None else resume.steps).values() if file in step.files), None)
    if step is None:
        raise error
    if not damaged({file: step.files[file]}):
        raise DamagedFile(error.file, f"{error.what}, as another machine reads it; on this machine it is intact")
    with naming_files("checkpoint"):
        mark_damaged(step.path, f"{file.relative_to(step.path)}: {error.what}")
    previous = newer(parts.copies.newest(), find)
    assert previous is not None, "where some are damaged and none is intact, it raises"
    parts.run.rewind(previous.run)
    return previous


def _recovered(fault: Exception, parts: Recoverable, find: Find) -> ResumePoint | None:
    with parts.restarts.recovery("rank", fault) as recovery, parts.run.phase("recovery"):
        resume = newer(parts.copies.newest(), find)
        recovery.lost_steps = parts.run.rewind(None if resume is None else resume.run)
        if resume is None:
            parts.run.note("nothing is saved yet: the run starts over")
        watch.renew()
        if parts.restart(resume is None):
            recovery.kind = "node"
        termination.poll()  # before reporting that the run resumes
    return resume


def newer(copied: tuple[int, Any] | None, find: Find) -> ResumePoint | None:
    """Return the copy in memory or the newest checkpoint, whichever has the later step.

    The copy may be the older one, since there may have been no room for copies for many steps.

    Args:
        copied: the copy's step and its record; None if there is none.
        find: see `recovering`.
    """
    if copied is None:
        return find()
    copy = ResumePoint({}, **copied[1], copy=copied[0])
    try:
        saved = find()
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
    return partial(resume_point, own, verb, items, own=True)
