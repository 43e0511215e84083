"""The training loop of the supervised stages: measure, learn step by step, measure, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from megarl.algorithms.objective import Objective
from megarl.checkpoints.files import LargeContent
from megarl.checkpoints.places import by_content
from megarl.checks.without_engines import Pairs
from megarl.config import DpoConfig, RmConfig, SftConfig
from megarl.data.conversations import Conversation, sample
from megarl.data.preferences import Preference
from megarl.data.sampler import Sampler
from megarl.driver.supervised_group import SupervisedGroup, start_supervised
from megarl.host import termination
from megarl.lazy_torch import import_meanwhile
from megarl.loops.show_data import tell_first
from megarl.observe.metrics import Metric, Sum, scalars
from megarl.observe.restarts import Restarts
from megarl.observe.run import BEST, Run
from megarl.plan.search import smallest_engine
from megarl.ranks.supervised_worker import MiniBatch, TrainSpec, mini_batch
from megarl.ranks.tower_work import TowerWork
from megarl.resume.best import Best
from megarl.resume.point import ResumePoint, resume_point
from megarl.resume.recovery import Recoverable, newest, recovering
from megarl.resume.saving import Checkpoints, every
from megarl.step.context import session


class SupervisedState:
    """The state of a supervised run between two steps."""

    def __init__(self, sampler: Sampler, best: Best) -> None:
        self.step, self.sampler, self.best = 0, sampler, best
        self.measured = 0  # the last step after which the held-out set was measured

    def improves(self, accuracy: float, loss: float) -> bool:
        """Record this step's evaluation; return whether it is the best so far. At equal accuracy, a lower loss is better."""
        self.measured = self.step
        return self.best.improves(self.step, accuracy, -loss)

    def state(self) -> dict[str, Any]:
        """Return the state as plain values for JSON."""
        return {"step": self.step, "measured": self.measured, "sampler": self.sampler.state(), "best": self.best.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. ValueError if it was taken with other data."""
        self.step = state["step"]
        self.sampler.restore(state["sampler"])
        self.measured = state["measured"]
        self.best.restore(state["best"])

    def files(self) -> dict[str, LargeContent]:
        """Return no files: items are drawn when they are needed."""
        return {}

    def restore_files(self, files: Mapping[str, PathLike[str]]) -> None:
        pass


@dataclass(frozen=True)
class Stage:
    """What a stage learns, and how."""

    config: SftConfig | RmConfig | DpoConfig
    objective: Objective
    draw: Callable[[list[int]], MiniBatch]
    """Makes a step's mini-batch from indices below the number of training items."""
    held_out: MiniBatch | None
    """Measured before the first step, every `eval_every` steps and after the last; None: no measurements."""
    finish: Callable[[Path, Mapping[str, float]], None] | None = None
    """Called with the directory of the final model and its held-out numbers."""


def learn(stage: Stage, items: int, shuffle: bool = True, first: Sequence[Conversation] | Sequence[Preference] = ()) -> None:
    """Take the stage's steps; the model is written to runs/<name>/model.

    This is the last model, or with `patience` the best. Without steps nothing is saved, since the model does not change. An interrupted run
    of this name resumes from its newest checkpoint, bit for bit.

    Args:
        stage: what is learned, and how.
        items: number of training items.
        shuffle: whether to draw the items of each epoch in random order, rather than in their own order.
        first: an item that is shown at the start.
    """
    config = stage.config
    resume = resume_point(config, config.section, items) if config.supervised.steps else None
    with Run(config, None if resume is None else resume.run) as run, session(config, run):
        import_meanwhile()
        run.engine_gpus = smallest_engine(config)
        tell_first(run, config, first)
        with run.starting("model ranks"):
            spec = TrainSpec(stage.objective, config.optimizer, config.supervised.steps)
            ranks = start_supervised(config, spec, blank=resume is not None)

        def work(start: ResumePoint | None) -> None:
            measure = None if config.data.eval is None else by_content(config.data.eval.model_dump())
            state = SupervisedState(Sampler(max(1, items), config.seed, shuffle), Best(run.directory / BEST, measure))
            take_steps(stage, run, ranks, state, start)

        restarts = Restarts(config.cluster.restarts, run.restarted, run.note)
        parts = Recoverable(run, restarts, ranks.copies, ranks.restart)
        recovering(work, resume, parts, newest(config, config.section, items))


def take_steps(stage: Stage, run: Run, ranks: SupervisedGroup, state: SupervisedState, resume: ResumePoint | None) -> None:
    """Take all steps of a run, from the beginning or from a checkpoint, and save the final model.

    Args:
        stage: what is learned, and how.
        run: the run, which is open.
        ranks: those that hold the model.
        state: the state at the beginning of the run.
        resume: the checkpoint to load into `state`; None: start from the beginning.
    """
    config, settings, held_out = stage.config, stage.config.supervised, stage.held_out
    checkpoints = Checkpoints(config, config.section, run, ranks)
    if resume is not None:
        checkpoints.load(resume, state)
    elif held_out is not None:
        run.held_out("held-out before" if settings.steps else "held-out", _measure(ranks, held_out, run))
    with termination.deferred():  # signals wait until the run can be saved
        while state.step < settings.steps and not (settings.patience and state.best.waited >= settings.patience):
            checkpoints.stop_where_asked(state)
            state.step += 1
            plan = stage.draw(state.sampler.take(settings.batch_size))
            with run.phase("update"):
                metrics = ranks.train(plan)
            run.log(state.step, metrics | {"perf/tokens": Sum(float(plan.tokens))})
            if held_out is not None and (every(settings.eval_every, state.step) or state.step == settings.steps):
                metrics = _measure(ranks, held_out, run)
                numbers = scalars(metrics)
                better = state.improves(numbers[f"{stage.objective.name}/accuracy"], numbers[f"{stage.objective.name}/loss"])
                run.held_out("held-out after" if better or not settings.patience else "held-out later", metrics, state.step)
                if better and settings.patience:
                    with run.phase("save"):
                        state.best.keep(ranks.save)
            checkpoints.after_step(state)
        checkpoints.finish()
        if held_out is not None and state.measured != state.step and not state.best.kept:  # resumed beyond `steps`, which was lowered
            run.held_out("held-out after", _measure(ranks, held_out, run), state.step)
        if settings.patience and state.best.kept:
            run.note(f"ends after step {state.step}; keeps the model of step {state.best.step}, the best")
            state.best.leave(run.directory / "model")
            run.model_step = state.best.step
        elif settings.steps:
            with run.phase("save"):
                ranks.save(run.directory / "model")
        if settings.steps and stage.finish is not None:
            stage.finish(run.directory / "model", run.results["held-out after"])


def _measure(ranks: SupervisedGroup, held_out: MiniBatch, run: Run) -> dict[str, Metric]:
    with run.phase("eval"):
        return ranks.measure(held_out)


def learn_pairs(
    config: RmConfig | DpoConfig, objective: Objective, pairs: Pairs, finish: Callable[[Path, Mapping[str, float]], None] | None = None
) -> None:
    """Run `learn` on pairs of responses.

    Args:
        config: the stage's configuration.
        objective: the stage's loss.
        pairs: training and held-out pairs.
        finish: see `Stage`.
    """

    tower = TowerWork.of(config.model, config.layout)

    def plan(batch: Sequence[Preference]) -> MiniBatch:
        samples = [sample(side) for pair in batch for side in (pair.chosen, pair.rejected)]
        margins = [pair.margin for pair in batch for _ in range(2)]
        return mini_batch(objective, samples, margins, config.layout.dp, config.supervised.micro_batch_tokens, tower)

    def draw(indices: list[int]) -> MiniBatch:
        return plan([pairs.train[index] for index in indices])

    learn(Stage(config, objective, draw, plan(pairs.held_out), finish), len(pairs.train), first=(pairs.train or pairs.held_out)[:1])
