"""`megarl value`: value pretraining as a stage of its own; its critic starts runs to come (`critic.path`)."""

from __future__ import annotations

from functools import partial

from megarl.config import TrainConfig
from megarl.observe.metrics import Metric
from megarl.observe.run import Run
from megarl.observe.signs import scale_metrics
from megarl.stages.checks import check_value
from megarl.stages.collect import collect, reference_scale
from megarl.stages.experience import Workplace, gather
from megarl.stages.judge import open_scorers
from megarl.stages.saving import Checkpoints, Progress, every, find
from megarl.workers.cluster import ray_session
from megarl.workers.plan import Collected
from megarl.workers.team import processes, start

SHOWN = "critic/"


def pretrain_value(config: TrainConfig) -> None:
    """Trains the critic of an RL configuration on rollouts of its policy, which is frozen; leaves it in runs/<name>/critic.

    Beside the metrics of each step's own rollouts, which the critic has not seen when they are taken, `heldout/...` are those of one set of
    rollouts for prompts of `data.eval`, before, every `train.eval_every` steps and after.
    """
    data = check_value(config)
    found = find(config, "value", len(data.train))
    with (
        Run(config, None if found is None else found.run) as run,
        ray_session(config.cluster, processes(config)),
        open_scorers(config.reward) as scorers,
    ):
        with run.phase("start"):
            team, engines = start(config)
        judge, _ = scorers.judges(team)
        progress, checkpoints = Progress(config, len(data.train)), Checkpoints(config, "value", run, team)
        if found is not None:
            checkpoints.load(found, progress)
        with run.phase("sync"):
            synced = team.sync(engines, progress.step)
        if found is None:
            progress.scale = reference_scale(config, data.train, engines, judge, run)
        place = Workplace(config, run, team, engines, judge.on(progress.scale))
        held_out = collect(config, 0, lambda count: data.eval[:count], engines, place.judge, run)
        if found is None:
            run.log(0, synced | scale_metrics(progress.scale) | measure(place, held_out, progress.kl_coef))
        while progress.pretraining.active:
            checkpoints.stop_at_alarm(progress, config.train.on_alarm)
            with checkpoints.kept(progress):
                experience = gather(place, progress.step + 1, partial(progress.draw, data.train), progress.kl_coef, monte_carlo=True)
            progress.step += 1
            with run.phase("update"):
                metrics = experience.metrics | team.learn(experience.plan, policy=False)
            progress.pretraining.observe(metrics)
            if every(config.train.eval_every, progress.step) or not progress.pretraining.active:
                metrics |= measure(place, held_out, progress.kl_coef)
            run.log(progress.step, metrics)
            if every(config.save.every, progress.step):
                checkpoints.save(progress.state())
        checkpoints.finish()
        with run.phase("save"):
            team.save("critic", run.directory / "critic")


def measure(place: Workplace, held_out: Collected, kl_coef: float) -> dict[str, Metric]:
    """What the critic explains of rollouts that it is not trained on, as heldout/..."""
    with place.run.phase("heldout"):
        plan, _ = place.team.score(held_out)
        _, metrics = place.team.advantages(plan, held_out.greedy, kl_coef, monte_carlo=True)
    return {f"heldout/{name.removeprefix(SHOWN)}": metric for name, metric in metrics.items()}
