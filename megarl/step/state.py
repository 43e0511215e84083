"""The state of an RL run between two steps: everything that is not in a model or a metric."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from megarl.checkpoints.places import by_content
from megarl.config import TrainConfig
from megarl.data.prompts import Prompt
from megarl.data.sampler import Sampler
from megarl.observe.metrics import Last, Mean, Metric
from megarl.observe.run import BEST
from megarl.ranks.response_file import ResponseFile
from megarl.ranks.step_plan import Group, StepPlan
from megarl.resume.best import Best
from megarl.resume.point import AHEAD
from megarl.rewards.scale import RewardScale
from megarl.step import in_flight
from megarl.step.groups import StepGroups
from megarl.step.pretraining import ValuePretraining

BATCH, REST = f"{AHEAD}npz", f"{AHEAD}rest.npz"


def measure(config: TrainConfig) -> list[Any]:
    """What `train.best` compares: the metric, its evaluation set, and the reward that scores it, as plain values for JSON."""
    best = config.train.best
    sets = {"heldout": config.data.eval, **{one.name: one for one in config.eval}}
    settings = [] if best is None else [sets[best.split("/")[1]], config.reward.eval]
    return [best, *(None if one is None else by_content(one.model_dump()) for one in settings)]


class TrainState:
    """Counters, sampler, KL coefficient, reward scale and value pretraining of a run.

    Args:
        config: the run's configuration.
        prompts: the prompts of data.train.
        stages: the pipeline stages over which experts are split (`ExpertsWanted.stages`).

    Attributes:
        step: number of steps so far, whether they trained the policy or only the critic.
        learned: number of steps in which the policy learned.
        evaluated: the step after which the policy was last evaluated.
        kl_coef: weight of the KL to the reference, adapted by `algorithm.kl_target`.
        scale: the scale of the rewards, with `reward.normalise`.
        ahead: the batch of the next step, if it exists already.
        pool: further groups that have begun and wait for a later step.
        best: the best evaluation, with `train.best`.
    """

    def __init__(self, config: TrainConfig, prompts: Sequence[Prompt], stages: in_flight.Stages = ()) -> None:
        self.step = self.learned = self.evaluated = 0
        self.kl_coef = config.algorithm.kl_coef
        self.scale: RewardScale | None = None
        self.best = Best(config.directory / BEST, measure(config))
        self.ahead: StepGroups | None = None
        self.pool: list[Group] = []
        self.sampler = Sampler(len(prompts), config.seed, config.data.shuffle)
        self.pretraining = ValuePretraining(config.critic)
        self._algorithm, self._prompts, self._stages = config.algorithm, prompts, stages

    @property
    def oldest(self) -> int:
        """The first step for which a group was requested that is still to be learned from, or that the run goes on with."""
        groups = [*(() if self.ahead is None else self.ahead.groups), *self.pool]
        return min([self.step + 1, *(group.asked[0] for group in groups)])

    def draw(self, count: int) -> list[tuple[int, Prompt]]:
        """Draw the next `count` prompts, each with its index among all."""
        return [(place, self._prompts[place]) for place in self.sampler.take(count)]

    def policy_learned(self, plan: StepPlan, kl_N: np.ndarray) -> dict[str, Metric]:
        """Count a step of the policy and adapt the KL coefficient; return the KL and the coefficient as metrics.

        `kl_N` is each response's KL to the reference in nats.
        """
        self.learned += 1
        if not self._algorithm.needs_reference:
            return {}
        kl = Mean(float(kl_N[plan.keep_N].sum()), float(plan.keep_N.sum()))
        metrics: dict[str, Metric] = {"actor/kl_coef": Last(self.kl_coef), "actor/reference_kl": kl}
        if plan.count_N is not None:
            per_token_N = kl_N[plan.keep_N] / plan.count_N[plan.keep_N]
            metrics["actor/reference_kl_per_token"] = Mean(float(per_token_N.sum()), float(len(per_token_N)))
        if self._algorithm.kl_target is not None:
            metrics["actor/kl_target"] = Last(self._algorithm.kl_target)
        self.kl_coef = self._algorithm.next_kl_coef(self.kl_coef, kl.value() or 0.0, int(kl.weight))
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state as plain values for JSON."""
        plain = {"step": self.step, "learned": self.learned, "evaluated": self.evaluated, "kl_coef": self.kl_coef, "oldest": self.oldest}
        scale = None if self.scale is None else self.scale.plain()
        return {
            **plain,
            "scale": scale,
            "best": self.best.state(),
            "sampler": self.sampler.state(),
            "pretraining": self.pretraining.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. ValueError if the prompts are different."""
        self.step, self.learned = state["step"], state["learned"]
        self.evaluated, self.kl_coef = state["evaluated"], state["kl_coef"]
        self.scale = None if state["scale"] is None else RewardScale(*state["scale"])
        self.best.restore(state["best"])
        self.sampler.restore(state["sampler"])
        self.pretraining.restore(state["pretraining"])

    def files(self) -> dict[str, ResponseFile]:
        """Return files of the batch ahead, and of the other groups that have begun."""
        groups_of = {BATCH: self.ahead, REST: StepGroups(self.pool) if self.pool else None}
        return {name: in_flight.dump(groups, self._stages) for name, groups in groups_of.items() if groups is not None}

    def restore_files(self, files: Mapping[str, PathLike[str]]) -> None:
        """Restore the batch and the groups from `files`."""
        groups_of = {name: in_flight.load(data, self._prompts, self._stages) for name, data in files.items()}
        self.ahead = groups_of.get(BATCH)
        self.pool = groups_of[REST].groups if REST in groups_of else []
