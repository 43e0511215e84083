"""Value pretraining of VC-PPO and VAPO (arXiv:2503.01491, arXiv:2504.05118): the policy is frozen, the critic learns its returns.

`ValuePretraining` says how long, inside an RL run and in `megarl value`, which leaves a critic for runs to come (`critic.path`).
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import CriticSettings, TrainConfig
from megarl.data.sampler import Sampler
from megarl.observe.metrics import Metric, scalars
from megarl.observe.run import Run
from megarl.stages.checks import check_value
from megarl.stages.collect import Collected, collect
from megarl.stages.experience import Workplace, gather
from megarl.stages.judge import open_scorers
from megarl.workers.cluster import ray_session
from megarl.workers.team import processes, start

PATIENCE = 10  # steps
SHOWN = "critic/"


class ValuePretraining:
    """Counts the steps in which the critic alone is trained.

    Over after `pretrain_steps`, or once both have converged: the mean value loss of the last 10 steps is less than `pretrain_tolerance` (a
    share) below that of the 10 before, and the mean explained variance less than as much (a difference) above it.
    """

    def __init__(self, settings: CriticSettings | None) -> None:
        self._left = 0 if settings is None else settings.pretrain_steps
        self._tolerance = 0.0 if settings is None else settings.pretrain_tolerance
        self._losses: list[float] = []
        self._explained: list[float] = []

    @property
    def active(self) -> bool:
        """Whether the policy is still frozen."""
        return self._left > 0

    def state(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {"left": self._left, "losses": self._losses, "explained": self._explained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stands where `state` was taken."""
        self._left, self._losses, self._explained = state["left"], list(state["losses"]), list(state["explained"])

    def observe(self, metrics: Mapping[str, Metric]) -> None:
        """Takes the metrics of a pretraining step."""
        self._left -= 1
        values = scalars(metrics)
        self._losses.append(values["critic/vf_loss"])
        self._explained.append(values.get("critic/explained_variance", 0.0))  # missing where the returns do not vary
        if len(self._losses) >= 2 * PATIENCE:
            loss, explained = _last_two(self._losses), _last_two(self._explained)
            if loss[1] > (1 - self._tolerance) * loss[0] and explained[1] < explained[0] + self._tolerance:
                self._left = 0


def pretrain_value(config: TrainConfig) -> None:
    """`megarl value`: trains the critic of an RL configuration on rollouts of its policy; leaves it in runs/<name>/critic.

    Beside the metrics of each step's own rollouts, which the critic has not seen when they are taken, `heldout/...` are those of one set of
    rollouts for prompts of `data.eval`, before, every `train.eval_every` steps and after.
    """
    data = check_value(config)
    with Run(config) as run, ray_session(config.cluster, processes(config)), open_scorers(config.reward) as scorers:
        with run.phase("start"):
            team, engines = start(config)
        place = Workplace(config, run, team, engines, scorers.judges(team)[0])
        with run.phase("sync"):
            run.log(0, team.sync(engines, 0))
        held_out = collect(config, 0, lambda count: data.eval[:count], engines, place.judge, run)
        sampler = Sampler(len(data.train), config.seed, config.data.shuffle)
        pretraining, kl_coef, step = ValuePretraining(config.critic), config.algorithm.kl_coef, 0
        run.log(0, measure(place, held_out, kl_coef))
        while pretraining.active:
            step += 1
            experience = gather(place, step, lambda count: [data.train[index] for index in sampler.take(count)], kl_coef)
            with run.phase("update"):
                metrics = experience.metrics | team.learn(experience.plan, policy=False)
            pretraining.observe(metrics)
            if config.train.eval_every and step % config.train.eval_every == 0 or not pretraining.active:
                metrics |= measure(place, held_out, kl_coef)
            run.log(step, metrics)
        with run.phase("save"):
            team.save("critic", run.directory / "critic")


def measure(place: Workplace, held_out: Collected, kl_coef: float) -> dict[str, Metric]:
    """What the critic explains of rollouts that it is not trained on, as heldout/..."""
    with place.run.phase("heldout"):
        plan, _ = place.team.score(held_out)
        _, metrics = place.team.advantages(plan, held_out.greedy, kl_coef)
    return {f"heldout/{name.removeprefix(SHOWN)}": metric for name, metric in metrics.items()}


def _last_two(values: list[float]) -> tuple[float, float]:
    """The means of the last PATIENCE values but PATIENCE, and of the last PATIENCE."""
    return sum(values[-2 * PATIENCE : -PATIENCE]) / PATIENCE, sum(values[-PATIENCE:]) / PATIENCE
