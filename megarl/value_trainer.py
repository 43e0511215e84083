"""`megarl value`: value pretraining as a stage of its own; its critic starts runs to come (`critic.path`)."""

from __future__ import annotations

from itertools import islice

from megarl import termination
from megarl.config import ValueConfig
from megarl.observe.metrics import Metric
from megarl.stages.checks import check_value
from megarl.stages.context import RunContext, open_context
from megarl.stages.data_checks import Data
from megarl.stages.recovery import newest, recovering
from megarl.stages.rollout import RolloutCollector, finish, reference_scale
from megarl.stages.rollout_metrics import scale_metrics
from megarl.stages.saving import Checkpoints, ResumePoint, every, resume_point
from megarl.stages.source import RolloutSource
from megarl.stages.train_state import TrainState
from megarl.trainer import train_step
from megarl.workers.plan import RolloutBatch

CRITIC = "critic/"


def pretrain_value(config: ValueConfig) -> None:
    """Trains the critic of an RL configuration on rollouts of its policy, which is frozen; leaves it in runs/<name>/critic.

    Beside the metrics of each step's own rollouts, which the critic has not seen when they are taken, `heldout/...` are those of one set of
    rollouts for prompts of `data.eval`, before, every `train.eval_every` steps and after.
    """
    data = check_value(config)
    resume = resume_point(config, "value", len(data.train))
    with open_context(config, resume) as ctx:
        recovering(lambda start: learn_values(ctx, data, start), resume, ctx, newest(config, "value", len(data.train)))


def learn_values(ctx: RunContext, data: Data, resume: ResumePoint | None) -> None:
    """All steps of a run, from the beginning or from a checkpoint; saves the critic.

    Args:
        ctx: of the run.
        data: that passed the checks.
        resume: the checkpoint; None: the run begins.
    """
    config, run = ctx.config, ctx.run
    state, checkpoints = TrainState(config, data.train, ctx.models.stages), Checkpoints(config, "value", run, ctx.models)
    if resume is not None:
        checkpoints.load(resume, state)
    with run.phase("sync"):
        synced = ctx.models.sync(ctx.engines, state.step)
    if resume is None:
        state.scale = reference_scale(ctx, data.train)
    questions = iter(enumerate(data.eval))
    held_out = finish(ctx, RolloutCollector(ctx, lambda count: list(islice(questions, count)), 0, state.scale)).batch()
    if resume is None:
        run.log(0, synced | scale_metrics(state.scale) | measure(ctx, held_out, state.kl_coef))
    with termination.deferred(), RolloutSource(ctx, state) as source:  # until the run can be saved
        while state.pretraining.active:
            checkpoints.stop_where_asked(state, config.train.on_alarm)
            with checkpoints.checkpoint_on_failure(state):
                metrics = train_step(ctx, state, source)
            if every(config.train.eval_every, state.step) or not state.pretraining.active:
                metrics |= measure(ctx, held_out, state.kl_coef)
            run.log(state.step, metrics)
            checkpoints.after_step(state)
        checkpoints.finish()
        with run.phase("save"):
            ctx.models.save("critic", run.directory / "critic")


def measure(ctx: RunContext, held_out: RolloutBatch, kl_coef: float) -> dict[str, Metric]:
    """What the critic explains of rollouts that it is not trained on.

    Args:
        ctx: of the run.
        held_out: those rollouts.
        kl_coef: the KL's coefficient in this step.

    Returns:
        Metrics named heldout/...
    """
    with ctx.run.phase("heldout"):
        plan, _ = ctx.models.forward(held_out)
        _, metrics = ctx.models.advantages(plan, held_out.greedy, kl_coef, monte_carlo=True)
    return {f"heldout/{name.removeprefix(CRITIC)}": metric for name, metric in metrics.items()}
