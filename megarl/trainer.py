"""The RL loop: generate, reward, score, update, sync. Each phase is one call; what it means lies with the callee."""

from __future__ import annotations

from functools import partial

from megarl.config import TrainConfig
from megarl.data.prompts import Prompt
from megarl.observe.metrics import Last, Mean
from megarl.observe.run import Run
from megarl.observe.signs import scale_metrics
from megarl.stages.checks import Data, check_train
from megarl.stages.collect import reference_scale
from megarl.stages.eval import evaluate
from megarl.stages.experience import Workplace, gather
from megarl.stages.judge import Scorers, open_scorers
from megarl.stages.saving import Checkpoints, Found, Progress, every, find
from megarl.workers.cluster import ray_session
from megarl.workers.engines import Engines
from megarl.workers.team import Team, processes, start


def train(config: TrainConfig) -> None:
    """Trains the policy of `config.model.path`; leaves runs/<name>/{model, metrics.jsonl, summary.json, ...}.

    A run of this name that was cut off goes on from its newest checkpoint, bit for bit.
    """
    data = check_train(config)
    found = find(config, "train", len(data.train))
    with (
        Run(config, None if found is None else found.run) as run,
        ray_session(config.cluster, processes(config)),
        open_scorers(config.reward) as scorers,
    ):
        with run.phase("start"):
            team, engines = start(config)
        learn(config, data, found, run, scorers, team, engines)


def learn(config: TrainConfig, data: Data, found: Found | None, run: Run, scorers: Scorers, team: Team, engines: Engines) -> None:
    """The run on workers that are there, from its beginning or from the checkpoint `found` to its last step."""
    judge, examiner = scorers.judges(team)
    progress, checkpoints = Progress(config, len(data.train)), Checkpoints(config, "train", run, team)
    if found is not None:
        checkpoints.load(found, progress)
    elif config.model.base is not None:
        evaluate("base", data.eval, engines, examiner, run, config.seed)
    with run.phase("sync"):
        synced = team.sync(engines, progress.step)
    if found is None:
        progress.scale = reference_scale(config, data.train, engines, judge, run)
        run.log(0, synced | scale_metrics(progress.scale))
        if config.train.eval_at_start:
            evaluate("sft", data.eval, engines, examiner, run, config.seed)
    place = Workplace(config, run, team, engines, judge.on(progress.scale))

    while True:
        if due(config, progress):
            with checkpoints.kept(progress):
                evaluate("rl", data.eval, engines, examiner, run, config.seed, progress.step)
            progress.evaluated = progress.step
        if progress.learned >= config.train.steps:
            break
        checkpoints.stop_at_alarm(progress, config.train.on_alarm)
        with checkpoints.kept(progress):
            train_step(place, progress, data.train)
        if every(config.save.every, progress.step):
            checkpoints.save(progress.state())
    checkpoints.finish()

    with run.phase("save"):
        team.save("policy", run.directory / "model")
        if config.critic is not None:
            team.save("critic", run.directory / "critic")


def due(config: TrainConfig, progress: Progress) -> bool:
    """Whether the policy, as it is, is to be evaluated, and has not been."""
    last, regular = progress.learned >= config.train.steps, every(config.train.eval_every, progress.learned)
    return progress.learned > 0 and progress.evaluated < progress.step and (last or regular)


def train_step(place: Workplace, progress: Progress, prompts: list[Prompt]) -> None:
    """One step: of critic and policy, or of the critic alone while it is pretrained."""
    config, run, team = place.config, place.run, place.team
    frozen = progress.pretraining.active
    experience = gather(place, progress.step + 1, partial(progress.draw, prompts), progress.kl_coef, monte_carlo=frozen)
    progress.step += 1
    with run.phase("update"):
        metrics = experience.metrics | team.learn(experience.plan, policy=not frozen)
    if frozen:
        progress.pretraining.observe(metrics)
        run.log(progress.step, metrics)
        return
    with run.phase("sync"):
        metrics |= team.sync(place.engines, progress.step)
    progress.learned += 1
    if config.algorithm.needs_reference:
        kl = Mean(float(experience.kl_N.sum()), float(experience.plan.keep_N.sum()))
        metrics |= {"actor/kl_coef": Last(progress.kl_coef), "actor/reference_kl": kl}
        if config.algorithm.kl_target is not None:
            metrics["actor/kl_target"] = Last(config.algorithm.kl_target)
        progress.kl_coef = config.algorithm.next_kl_coef(progress.kl_coef, kl.value() or 0.0, int(kl.weight))
    run.log(progress.step, metrics)
