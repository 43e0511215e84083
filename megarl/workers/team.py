"""The workers of an RL run behind the words of the algorithm: generate, score, update, sync, save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.config import RolloutSettings, RunSettings
from megarl.data.prompts import Prompt
from megarl.observe.metrics import Metric, merge
from megarl.rollout.engine import Sampling
from megarl.workers.cluster import Group
from megarl.workers.model_worker import ModelWorker, Objective
from megarl.workers.plan import StepPlan
from megarl.workers.rollout_worker import Response, RolloutWorker


@dataclass(frozen=True)
class Ranks:
    """The model ranks: one process each, together one model."""

    group: Group
    timeout_s: float

    @classmethod
    def start(cls, config: RunSettings, objective: Objective, places: Sequence[Any]) -> Ranks:
        """Builds the model on every rank and loads its weights."""
        actor = ray.remote(ModelWorker)
        actors = [
            actor.options(num_cpus=1, num_gpus=int(config.cluster.gpus), scheduling_strategy=place).remote(rank, config, objective)
            for rank, place in enumerate(places)
        ]
        ranks = cls(Group("rank", actors), config.cluster.phase_timeout_s)
        start = config.cluster.start_timeout_s
        [address] = Group("rank", actors[:1]).call("listen", timeout_s=start)
        ranks.group.call("build", address, timeout_s=start)
        return ranks

    def score(self, plan: StepPlan) -> dict[str, Metric]:
        """Hands the step to the ranks; they compute log-probs of the policy it starts from, and the reference's."""
        return merge(self.group.call("score", plan, timeout_s=self.timeout_s))

    def update(self, mini_batch: int) -> dict[str, Metric]:
        """One optimizer step on a mini-batch of the last scored plan."""
        return merge(self.group.call("update", mini_batch, timeout_s=self.timeout_s))

    def save(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face directory."""
        self.group.call("save", directory, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Engines:
    """The rollout engines."""

    group: Group
    settings: RolloutSettings

    @classmethod
    def start(cls, model: Path, config: RunSettings, settings: RolloutSettings, places: Sequence[Any]) -> Engines:
        gpus = config.cluster.gpus
        actor = ray.remote(RolloutWorker)
        actors = [
            actor.options(num_cpus=1, num_gpus=settings.tp if gpus else 0, scheduling_strategy=place).remote(f"engine {index}")
            for index, place in enumerate(places)
        ]
        engines = cls(Group("engine", actors), settings)
        engines.group.call("open", model, config.model.dtype, settings, config.seed, gpus, timeout_s=config.cluster.start_timeout_s)
        return engines

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Response]:
        """The responses to every prompt, in the order of the prompts, which are dealt to the replicas in turn."""
        numbered = list(enumerate(prompts))
        shares = [[(number, prompt.tokens) for number, prompt in numbered[index :: len(self.group.actors)]] for index in range(len(self.group.actors))]
        busy = [(actor, share) for actor, share in zip(self.group.actors, shares, strict=True) if share]
        references = [actor.respond.remote(share, sampling) for actor, share in busy]
        answers = self.group.wait(references, "generate", self.settings.timeout_s)
        return sorted((response for answer in answers for response in answer), key=lambda response: (response.prompt, response.index))


def call_seed(run_seed: int, step: int) -> int:
    """The seed of one generate call: a function of the run's seed and the step alone."""
    return run_seed * 1_000_000 + step
