"""What every step of an RL run works with: model workers, engines, rewards, the open run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from megarl.cluster.process_kinds import demand, files, processes
from megarl.cluster.session import ray_session
from megarl.config import RunSettings, TrainConfig
from megarl.driver.engines import Engines, overruled
from megarl.driver.model_groups import ModelGroups, start
from megarl.lazy_torch import import_meanwhile
from megarl.observe.output import new_log
from megarl.observe.restarts import Restarts
from megarl.observe.run import Run
from megarl.resume.point import ResumePoint
from megarl.resume.recovery import Recoverable
from megarl.step.reward import Reward, open_scorers


@contextmanager
def session(config: RunSettings, run: Run) -> Iterator[None]:
    """Open the Ray session of a run, and report its start, and what of the environment the run does not use."""
    if (unused := overruled(config)) is not None:
        run.note(unused)
    kinds = demand(config)
    run.starts_on(sum(kind.processes * kind.gpus for kind in kinds))
    with ExitStack() as stack:
        with run.starting("Ray"):
            stack.enter_context(ray_session(config.cluster, processes(kinds), files(config)[0]))
        yield


@dataclass(frozen=True)
class RunContext:
    """The parts of an RL run that last as long as the run."""

    config: TrainConfig
    run: Run
    models: ModelGroups
    engines: Engines
    train_reward: Reward
    eval_reward: Reward
    restarts: Restarts

    @property
    def recoverable(self) -> Recoverable:
        """The parts that recovery needs."""
        return Recoverable(self.run, self.restarts, self.models.copies, partial(self.models.restart, self.engines))


@contextmanager
def open_context(config: TrainConfig, resume: ResumePoint | None) -> Iterator[RunContext]:
    """Open the run, and start Ray, the scoring processes, the model workers and the engines; end them all on exit."""
    with Run(config, None if resume is None else resume.run) as run, session(config, run), ExitStack() as stack:
        with run.starting("scoring processes"):
            scorers = stack.enter_context(open_scorers(config.reward, run.note, new_log(run.directory, "rewards")))
        restarts = Restarts(config.cluster.restarts, run.restarted, run.note)
        models, engines = start(config, run.starting, restarts, blank=resume is not None)
        engines.note_sandbox(run.note)
        import_meanwhile()  # during the first rollout; before, it would take a core from engines and ranks, which import as much
        yield RunContext(config, run, models, engines, *scorers.rewards(models), restarts)
