"""The rollout engines of a run, as the driver sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.cluster.actor_group import ActorGroup
from megarl.config import EnvironmentSettings, EvalConfig, PairsConfig, RolloutSettings, RunSettings, TrainConfig
from megarl.data.prompts import Prompt
from megarl.rollout.episodes import Limits, Start
from megarl.rollout.generate import Sampling
from megarl.rollout.registry import ENGINES
from megarl.workers.demand import engine_kind
from megarl.workers.rollout_worker import ExpertsWanted, Response, RolloutWorker
from megarl.workers.turns import Turns
from megarl.workers.worker_group import reserve_workers


@dataclass(frozen=True)
class Engines:
    """The rollout engines."""

    group: ActorGroup
    settings: RolloutSettings
    turns: Turns | None = None  # where they share devices with the policy's ranks
    environment: EnvironmentSettings | None = None  # what answers the policy's turns; None: each prompt has one response

    @classmethod
    def create(cls, config: RunSettings, settings: RolloutSettings, places: Sequence[Any]) -> Engines:
        """Starts the processes; `open` gives them weights.

        Args:
            config: says whether GPUs are used, and whether ranks use the same.
            settings: of the engines.
            places: a scheduling strategy for each engine, of `reserve_workers`.
        """
        shared = isinstance(config, TrainConfig) and config.placement.engines == "shared"
        actor, gpus = ray.remote(RolloutWorker), settings.tp if config.cluster.gpus else 0
        as_guests = shared and config.cluster.gpus  # in the place of a rank
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0} if as_guests else {"num_cpus": 1, "num_gpus": gpus}
        if gpus and config.cluster.deterministic:
            options["runtime_env"] = {"env_vars": {"VLLM_BATCH_INVARIANT": "1"}}
        actors = [
            actor.options(scheduling_strategy=place, **options).remote(f"engine {index}", ENGINES[settings.engine.type])
            for index, place in enumerate(places)
        ]
        group = ActorGroup("engine", actors)
        environment = None if isinstance(config, PairsConfig) else getattr(config, "environment", None)
        return cls(group, settings, Turns(group, config.cluster.phase_timeout_s) if shared else None, environment)

    def open(self, model: Path, config: RunSettings, devices: Sequence[str] = ()) -> list[Any]:
        """Starts every engine with the weights of `model`; returns at once, with what to wait for.

        Args:
            model: a Hugging Face directory.
            config: of the run.
            devices: the GPUs of the ranks that they share them with, `rollout.tp` for each engine; none: Ray has given them their own.
        """
        report_experts = isinstance(config, TrainConfig) and config.routing.reported > 0
        dtype = self.settings.dtype or config.model.dtype
        tp, told = self.settings.tp, (model, dtype, self.settings, config.seed, config.cluster.gpus, report_experts, self.turns is not None)
        return [actor.open.remote(*told, devices[index * tp : (index + 1) * tp]) for index, actor in enumerate(self.group.actors)]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, experts: ExpertsWanted | None = None) -> list[Response]:
        """The responses to every prompt, in the order of the prompts, which are dealt to the replicas in turn."""
        if self.turns is not None:
            self.turns.to_engines()
        sampling = sampling.within(self.settings)
        references = [
            self._ask(actor, dict(list(enumerate(prompts))[index :: len(self.group.actors)]), sampling, experts)
            for index, actor in enumerate(self.group.actors)
            if index < len(prompts)
        ]
        answers = self.group.wait(references, "generate", self.settings.timeout_s)
        return sorted((response for answer in answers for response in answer), key=lambda response: (response.prompt, response.index))

    def _ask(self, actor: Any, share: Mapping[int, Prompt], sampling: Sampling, experts: ExpertsWanted | None) -> Any:
        """A reference to what one engine answers to prompts, by their numbers."""
        if self.environment is None:
            return actor.respond.remote([(number, prompt.tokens) for number, prompt in share.items()], sampling, experts)
        starts = [Start(number, prompt.tokens, prompt.seed, prompt.task) for number, prompt in share.items()]
        settings, environment = self.settings, self.environment
        limits = Limits(settings.max_prompt_tokens, sampling.max_tokens, environment.max_turns, environment.max_turn_tokens)
        return actor.play.remote(starts, sampling, limits, environment, experts)


def start_engines(config: EvalConfig | PairsConfig | TrainConfig) -> Engines:
    """Engines alone, ready."""
    [places] = reserve_workers(config, [engine_kind(config.rollout, config.cluster.gpus)])
    engines = Engines.create(config, config.rollout, places)
    engines.group.wait(engines.open(config.model.path, config), "start", config.cluster.start_timeout_s)
    return engines


def call_seed(run_seed: int, step: int, round_: int = 0) -> int:
    """The seed of one generate call: a function of the run's seed, the step and the sampling round alone."""
    return (run_seed * 1_000_000 + step) * 1_000 + round_
