"""The workers of a run behind the words of the algorithm: generate, score, update, sync, save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from megarl.config import EvalConfig, Layout, RolloutSettings, RunSettings, SyncSettings, TrainConfig
from megarl.data.prompts import Prompt
from megarl.observe.metrics import Mean, Metric, Sum, merge
from megarl.rollout.engine import Sampling
from megarl.workers.cluster import Group, reserve
from megarl.workers.model_worker import ModelWorker, Objective
from megarl.workers.plan import StepPlan
from megarl.workers.rank import Rank
from megarl.workers.rollout_worker import Response, RolloutWorker


@dataclass(frozen=True)
class Ranks:
    """The model ranks: one process each, together one model."""

    group: Group
    timeout_s: float

    def score(self, plan: StepPlan) -> dict[str, Metric]:
        """Hands the step to the ranks; they compute log-probs of the policy it starts from, and the reference's."""
        return merge(self.group.call("score", plan, timeout_s=self.timeout_s))

    def sequence_kl(self, responses: int) -> np.ndarray:
        """sum_t (old_t - ref_t) of each response of the scored plan, float64 [N]; 0 without a reference."""
        kl_N = np.zeros(responses)
        for part in self.group.call("sequence_kl", timeout_s=self.timeout_s):
            for n, value in part.items():
                kl_N[n] += value
        return kl_N

    def advantages(self, advantage_N: np.ndarray, kl_coef: float) -> dict[str, Metric]:
        """Gives every token of the scored plan its advantage, from one number a response; what a critic explained of the returns."""
        return merge(self.group.call("advantages", advantage_N, kl_coef, timeout_s=self.timeout_s))

    def update(self, mini_batch: int) -> dict[str, Metric]:
        """One optimizer step on a mini-batch of the last scored plan."""
        return _one_update(merge(self.group.call("update", mini_batch, timeout_s=self.timeout_s)))

    def update_critic(self, mini_batch: int) -> dict[str, Metric]:
        """One optimizer step of the critic on a mini-batch of the last scored plan."""
        return merge(self.group.call("update_critic", mini_batch, timeout_s=self.timeout_s))

    def train(self, plan: StepPlan) -> dict[str, Metric]:
        """One optimizer step on a plan of one mini-batch that needs no scoring."""
        return _one_update(merge(self.group.call("train", plan, timeout_s=self.timeout_s)))

    def sync(self, engines: Engines, version: int, settings: SyncSettings) -> dict[str, Metric]:
        """Brings the policy's weights into every engine, verified tensor by tensor where `settings.verify`."""
        arguments = (engines.group.actors, engines.settings.tp, version, settings)
        return merge(self.group.call("sync", *arguments, timeout_s=settings.timeout_s))

    def save(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face directory."""
        self.group.call("save", directory, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Engines:
    """The rollout engines."""

    group: Group
    settings: RolloutSettings

    @classmethod
    def create(cls, config: RunSettings, settings: RolloutSettings, places: Sequence[Any]) -> Engines:
        """Starts the processes; `open` gives them weights."""
        actor, gpus = ray.remote(RolloutWorker), settings.tp if config.cluster.gpus else 0
        actors = [
            actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=place).remote(f"engine {index}")
            for index, place in enumerate(places)
        ]
        return cls(Group("engine", actors), settings)

    def open(self, model: Path, config: RunSettings) -> list[Any]:
        """Starts every engine with the weights of `model`; returns at once, with what to wait for."""
        return self.group.start("open", model, config.model.dtype, self.settings, config.seed, config.cluster.gpus)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Response]:
        """The responses to every prompt, in the order of the prompts, which are dealt to the replicas in turn."""
        numbered = [(number, prompt.tokens) for number, prompt in enumerate(prompts)]
        replicas = len(self.group.actors)
        busy = [(actor, numbered[index::replicas]) for index, actor in enumerate(self.group.actors) if index < len(numbered)]
        references = [actor.respond.remote(share, sampling) for actor, share in busy]
        answers = self.group.wait(references, "generate", self.settings.timeout_s)
        return sorted((response for answer in answers for response in answer), key=lambda response: (response.prompt, response.index))


def _one_update(metrics: dict[str, Metric]) -> dict[str, Metric]:
    """The ranks' parts of the loss are a sum over one mini-batch, and a mean over the mini-batches of a step."""
    loss = metrics["actor/pg_loss"]
    assert isinstance(loss, Sum)
    return {**metrics, "actor/pg_loss": Mean(loss.total, 1.0)}


def start_ranks(worker: type[Rank], config: RunSettings, layout: Layout, places: Sequence[Any], *arguments: Any) -> Group:
    """A process of class `worker` at each place, with the models built; `arguments` go to the class after (rank, config, layout)."""
    actor, gpus = ray.remote(worker), int(config.cluster.gpus)
    actors = [
        actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=place).remote(rank, config, layout, *arguments)
        for rank, place in enumerate(places)
    ]
    group, timeout_s = Group("rank", actors), config.cluster.start_timeout_s
    [address] = Group("rank", actors[:1]).call("listen", timeout_s=timeout_s)
    group.call("build", address, timeout_s=timeout_s)
    return group


def reserve_workers(config: RunSettings, ranks: int = 0, engines: RolloutSettings | None = None) -> list[Any]:
    """A place for each model rank, then one for each engine."""

    def bundle(gpus: int) -> dict[str, float]:
        return {"CPU": 1.0, "GPU": float(gpus)} if config.cluster.gpus else {"CPU": 1.0}

    bundles = [bundle(1)] * ranks + ([bundle(engines.tp)] * engines.replicas if engines is not None else [])
    return reserve(bundles, config.cluster.start_timeout_s)


def start(config: TrainConfig) -> tuple[Ranks, Engines]:
    """Ranks and engines, ready; both start at the same time. The engines begin with `model.base` where there is one."""
    settings = config.cluster
    places = reserve_workers(config, ranks=config.layout.ranks, engines=config.rollout)
    engines = Engines.create(config, config.rollout, places[config.layout.ranks :])
    opening = engines.open(config.model.base or config.model.path, config)
    updates, critic = config.train.steps * config.train.mini_batches, config.critic
    critic_updates = 0 if critic is None else critic.epochs * (updates + critic.pretrain_steps * config.train.mini_batches)
    objective = Objective(config.algorithm, config.optimizer, updates, config.rollout.temperature, critic, critic_updates)
    group = start_ranks(ModelWorker, config, config.layout, places[: config.layout.ranks], objective)
    engines.group.wait(opening, "start", settings.start_timeout_s)
    return Ranks(group, settings.phase_timeout_s), engines


def start_engines(config: EvalConfig) -> Engines:
    """Engines alone, ready."""
    engines = Engines.create(config, config.rollout, reserve_workers(config, engines=config.rollout))
    engines.group.wait(engines.open(config.model.path, config), "start", config.cluster.start_timeout_s)
    return engines


def call_seed(run_seed: int, step: int, round_: int = 0) -> int:
    """The seed of one generate call: a function of the run's seed, the step and the sampling round alone."""
    return (run_seed * 1_000_000 + step) * 1_000 + round_
