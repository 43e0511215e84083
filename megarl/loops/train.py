"""The RL loop: generate, score, forward, advantages, update, sync. Each phase is one call."""

import sys
import time
from collections.abc import Callable, Mapping

from megarl.checks.data import Data
from megarl.checks.train import check_train
from megarl.config import StepSettings, TrainConfig
from megarl.host import termination
from megarl.loops.evaluate import evaluate
from megarl.loops.show_data import tell_first
from megarl.models.description import ModelDescription
from megarl.observe.metrics import Metric
from megarl.resume.finished import has_finished
from megarl.resume.point import ResumePoint, resume_point
from megarl.resume.recovery import newest, recovering
from megarl.resume.saving import Checkpoints, every
from megarl.resume.shown_images import ShownImages
from megarl.step.context import RunContext, open_context
from megarl.step.groups import reference_scale
from megarl.step.logprob_gap import check_gap
from megarl.step.metrics import lag_metrics, missing_groups, rollout_metrics, scale_metrics
from megarl.step.source import RolloutSource
from megarl.step.state import TrainState


def train(config: TrainConfig) -> None:
    """Train a policy that starts from `config.model.path`; write runs/<name>/{model, metrics.jsonl, summary.json, ...}.

    An interrupted run of this name resumes from its newest checkpoint, and so does this run if its ranks fail. With the same layout the
    result is bit-identical to that of an uninterrupted run, except with rollout.mode=free.
    """
    if has_finished(config):
        return
    start = time.monotonic()
    data = check_train(config)
    checked = f"model, reward and {len(data.train):,} prompts: checked in {time.monotonic() - start:.1f} s"
    print(f"{config.name}: {checked}", file=sys.stderr, flush=True)
    run_steps(config, "train", data, learn)


def run_steps(config: TrainConfig, verb: str, data: Data, steps: Callable[[RunContext, Data, ResumePoint | None], None]) -> None:
    """Open the run, and take all its steps, however often its ranks fail, as far as `cluster.restarts` allows.

    Args:
        config: the run's configuration.
        verb: the run's verb.
        data: the checked data.
        steps: takes the steps, from the beginning or from a checkpoint.
    """
    resume = resume_point(config, verb, len(data.train))
    with open_context(config, resume) as ctx:
        tell_first(ctx.run, config, data.train[:1])
        recovering(lambda start: steps(ctx, data, start), resume, ctx.recoverable, newest(config, verb, len(data.train)))


def learn(ctx: RunContext, data: Data, resume: ResumePoint | None) -> None:
    """Run all steps, from the beginning or from a checkpoint, and save the final models.

    Args:
        ctx: the run's context.
        data: the checked data.
        resume: the checkpoint to resume from; None: start from the beginning.
    """
    config, run, models, engines = ctx.config, ctx.run, ctx.models, ctx.engines
    state, checkpoints = TrainState(config, data.train, ctx.models.stages), Checkpoints(config, "train", run, models)
    images = ShownImages(run.directory)
    if resume is not None:
        checkpoints.load(resume, state)
    elif config.model.base is not None:
        evaluate("base", data.sets, engines, ctx.eval_reward, run, config.seed)
    with run.phase("sync"):
        synced = models.sync(engines, state.step)
    if resume is None:
        state.scale = reference_scale(ctx, data.train)
        run.log(0, synced | scale_metrics(state.scale))
        if config.train.eval_at_start:
            evaluate("start", data.sets, engines, ctx.eval_reward, run, config.seed)

    with termination.deferred(), RolloutSource(ctx, state) as source:  # signals wait until the run can be saved
        while True:
            if evaluation_due(config.train, state):
                with checkpoints.checkpoint_on_failure(state):
                    numbers = evaluate("end", data.sets, engines, ctx.eval_reward, run, config.seed, state.step)
                state.evaluated = state.step
                keep_best(ctx, state, numbers)
            if state.learned >= config.train.steps or (config.train.patience and state.best.waited >= config.train.patience):
                break
            checkpoints.stop_where_asked(state, config.train.on_alarm)
            with checkpoints.checkpoint_on_failure(state):
                metrics = train_step(ctx, state, source)
            run.log(state.step, metrics)
            checkpoints.after_step(state)
            images.after_step(state.step, state.oldest)
        checkpoints.finish()

        with run.phase("save"):
            if config.train.best is not None and state.best.kept:
                run.note(f"ends after step {state.step}; keeps the policy of step {state.best.step}, the best in {config.train.best}")
                state.best.leave(run.directory / "model")
                run.model_step = state.best.step
            else:
                models.save("policy", run.directory / "model")
            if config.critic is not None:
                models.save("critic", run.directory / "critic")


def keep_best(ctx: RunContext, state: TrainState, numbers: Mapping[str, float]) -> None:
    """Keep a copy of the policy if this evaluation is the best so far by the metric `train.best`.

    Args:
        ctx: the run's context.
        state: the run's state.
        numbers: the evaluation's results, by metric name.
    """
    metric = ctx.config.train.best
    if metric is not None and metric in numbers and state.best.improves(state.step, numbers[metric]):  # absent: nothing could be scored
        with ctx.run.phase("save"):
            state.best.keep(lambda directory: ctx.models.save("policy", directory))


def evaluation_due(train: StepSettings, state: TrainState) -> bool:
    """Whether an evaluation of the current policy is due and has not been done yet."""
    last, regular = state.learned >= train.steps, every(train.eval_every, state.learned)
    return state.learned > 0 and state.evaluated < state.step and (last or regular)


def compare_engines(ctx: RunContext, measured: Mapping[str, Metric]) -> None:
    """Warn if engines and trainer disagree about log-probs, as far as these metrics tell; RuntimeError if they run different models."""
    config = ctx.config
    vocabulary = ModelDescription.read(config.model.path).vocab
    if warning := check_gap(measured, config.sync, config.rollout, config.train.logp_over, config.model.dtype, vocabulary):
        ctx.run.event("logprob_gap", warning)


def train_step(ctx: RunContext, state: TrainState, source: RolloutSource) -> dict[str, Metric]:
    """Take one step of critic and policy, or of the critic alone during value pretraining.

    Args:
        ctx: the run's context.
        state: the run's state; advances by one step.
        source: provides the responses.

    Returns:
        The step's metrics.
    """
    config, run, models = ctx.config, ctx.run, ctx.models
    critic_only = state.pretraining.active

    step_groups = source.next_groups()
    groups = step_groups.groups
    run.keep(state.step + 1, step_groups.samples(config.log.samples))
    metrics = step_groups.metrics | rollout_metrics(groups)
    metrics |= lag_metrics(step_groups.responses, state.learned, frozen=state.step - state.learned, most=config.rollout.largest_lag)

    # The first step compares the engines' log-probs with the trainer's: before the update, unless that computes the trainer's itself.
    first = state.step == 0
    with run.phase("old_logp"):  # also the reference's log-probs and the critic's values
        plan, forward_metrics = models.forward(
            groups, score=first and (critic_only or config.old_logp != "update"), sync_follows=not critic_only
        )
    if first:
        compare_engines(ctx, forward_metrics)
    with run.phase("advantage"):
        kl_N, advantage_metrics = models.advantages(plan, [group.greedy for group in groups], state.kl_coef, monte_carlo=critic_only)
    metrics |= forward_metrics | advantage_metrics | missing_groups(plan)

    state.step += 1
    with run.phase("update"):
        updated = models.update(plan, policy=not critic_only)
    if first:
        compare_engines(ctx, updated)
    metrics |= updated
    source.after_update(sync_follows=not critic_only)
    metrics |= source.metrics()
    if critic_only:
        state.pretraining.observe(metrics)
        return metrics
    with run.phase("sync"):
        metrics |= models.sync(ctx.engines, state.step)
    return metrics | state.policy_learned(plan, kl_N)
