"""`megarl value`: value pretraining as a separate stage, whose critic later runs can start from (`critic.path`)."""

from collections.abc import Sequence
from itertools import islice

from megarl.checks.data import Data
from megarl.checks.train import check_value
from megarl.config import ValueConfig
from megarl.host import termination
from megarl.loops.train import run_steps, train_step
from megarl.observe.metrics import Metric
from megarl.ranks.step_plan import Group
from megarl.resume.finished import has_finished
from megarl.resume.point import ResumePoint
from megarl.resume.saving import Checkpoints, every
from megarl.resume.shown_images import ShownImages
from megarl.step.context import RunContext
from megarl.step.groups import RolloutCollector, finish, reference_scale
from megarl.step.metrics import scale_metrics
from megarl.step.source import RolloutSource
from megarl.step.state import TrainState

CRITIC = "critic/"


def pretrain_value(config: ValueConfig) -> None:
    """Train the critic of an RL configuration on rollouts of its frozen policy; save it to runs/<name>/critic.

    Each step reports metrics on its own rollouts, computed before the critic learns from them. The `heldout/...` metrics are computed on
    one fixed set of rollouts for prompts of `data.eval`: before training, every `train.eval_every` steps, and after training.
    """
    if has_finished(config):
        return
    run_steps(config, "value", check_value(config), learn_values)


def learn_values(ctx: RunContext, data: Data, resume: ResumePoint | None) -> None:
    """Run all steps, from the beginning or from a checkpoint, and save the critic.

    Args:
        ctx: the run's context.
        data: the checked data.
        resume: the checkpoint to resume from; None: start from the beginning.
    """
    config, run = ctx.config, ctx.run
    state, checkpoints = TrainState(config, data.train, ctx.models.stages), Checkpoints(config, "value", run, ctx.models)
    images = ShownImages(run.directory)
    if resume is not None:
        checkpoints.load(resume, state)
    with run.phase("sync"):
        synced = ctx.models.sync(ctx.engines, state.step)
    if resume is None:
        state.scale = reference_scale(ctx, data.train)
    questions = iter(enumerate(data.eval))
    held_out = finish(ctx, RolloutCollector(ctx, lambda count: list(islice(questions, count)), 0, state.scale)).groups
    if resume is None:
        run.log(0, synced | scale_metrics(state.scale) | measure(ctx, held_out, state.kl_coef))
    with termination.deferred(), RolloutSource(ctx, state) as source:  # signals wait until the run can be saved
        while state.pretraining.active:
            checkpoints.stop_where_asked(state, config.train.on_alarm)
            with checkpoints.checkpoint_on_failure(state):
                metrics = train_step(ctx, state, source)
            if every(config.train.eval_every, state.step) or not state.pretraining.active:
                metrics |= measure(ctx, held_out, state.kl_coef)
            run.log(state.step, metrics)
            checkpoints.after_step(state)
            images.after_step(state.step, state.oldest)
        checkpoints.finish()
        with run.phase("save"):
            ctx.models.save("critic", run.directory / "critic")


def measure(ctx: RunContext, held_out: Sequence[Group], kl_coef: float) -> dict[str, Metric]:
    """Measure how well the critic explains rollouts that it is not trained on.

    Args:
        ctx: the run's context.
        held_out: the rollouts.
        kl_coef: the KL coefficient in this step.

    Returns:
        Metrics named heldout/...
    """
    with ctx.run.phase("heldout"):
        plan, _ = ctx.models.forward(held_out, sync_follows=False)  # the policy is frozen
        _, metrics = ctx.models.advantages(plan, [group.greedy for group in held_out], kl_coef, monte_carlo=True)
    return {f"heldout/{name.removeprefix(CRITIC)}": metric for name, metric in metrics.items()}
