"""A step of the RL loop's own ranks on responses with images, of which an episode has several contexts."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl  # noqa: F401  # which every rank would import
from pydantic import TypeAdapter

from megarl.algorithms import Algorithm, PolicyAlgorithm
from megarl.batch import Sample
from megarl.config import CriticSettings, LoraSettings, OptimizerSettings, RoutingSettings
from megarl.engines.episodes import chained
from megarl.observe.metrics import Metric
from megarl.parallel.grid import Grid
from megarl.ranks.step_plan import ScoringPlan, StepPlan
from megarl.ranks.step_worker import RLSpec
from tests.distributed.loop_ranks import object_store, rl_rank
from tests.distributed.replayed_steps import Token, old_logps
from tests.distributed.split_episodes import plan_of, two_updates
from tests.image_samples import samples

SMALL, LARGE = 150, 4000  # capacities of a micro-batch


@dataclass(frozen=True)
class Case:
    """Two updates of a policy on the same responses."""

    path: Path
    algorithm: dict[str, Any]
    capacity: int = SMALL
    replay: Literal["off", "r2", "r3"] = "off"
    lora: LoraSettings | None = None
    images: bool = True  # False: the same tokens, as text


@dataclass
class Learned:
    """What one rank saw."""

    logp: dict[Token, float] = field(default_factory=dict)  # the old log-probs, on the ranks that report
    scores: dict[int, float] = field(default_factory=dict)  # of a reward model
    updates: list[dict[str, Metric]] = field(default_factory=list)
    scored: dict[str, Metric] = field(default_factory=dict)


def episodes(path: Path) -> list[Sample]:
    """Four responses with two, no, one and three images; the last has two contexts, each with its own."""
    first, text, second, one, other = samples(path, (2, 0, 1, 1, 2))
    return [first, text, second, chained([one, other])]


def with_experts(plan: StepPlan, own: list[Sample], stages: list[list[int]]) -> StepPlan:
    """The plan with other experts than a router would choose, for each of the stages' layers."""
    rng = np.random.default_rng(5)

    def experts(sample: Sample) -> list[list[np.ndarray]]:
        chosen = rng.random((len(sample.tokens) - 1 - len(sample.starts), 4, 4)).argsort(-1)[:, :, :2].astype(np.uint8)
        return [[chosen[:, stage] for stage in stages]]

    return replace(plan, experts_N=[experts(sample) for sample in own], stages=stages)


def learn(grid: Grid, case: Case) -> Learned:
    """The step of one rank."""
    algorithm: PolicyAlgorithm = TypeAdapter(Algorithm).validate_python(case.algorithm)
    critic = CriticSettings() if algorithm.needs_critic else None
    spec = RLSpec(
        algorithm,
        OptimizerSettings(lr=0.01),
        updates=100,
        temperature=1.0,
        critic=critic,
        critic_updates=100,
        routing=RoutingSettings(replay=case.replay),
        reward=case.path,
    )
    rank = rl_rank(grid, case.path, spec, "policy", "reference", "reward", *(["critic"] if critic else []), lora=case.lora)
    seen, layers = Learned(), rank.moe_shape().layers
    size = layers // grid.layout.pp
    stages = [list(range(first, first + size)) for first in range(0, layers, size)] if case.replay == "r3" else []
    with object_store():
        own = episodes(case.path)
        own = own if case.images else [replace(sample, images=()) for sample in own]
        plan = plan_of(algorithm, own, grid.dp_size, case.capacity)
        plan = with_experts(plan, own, stages) if stages else plan
        seen.scores = rank.rewards(ScoringPlan(own, [[[n] for n in range(4) if n % grid.dp_size == r] for r in range(grid.dp_size)]))
        seen.scored = rank.forward(plan)
        seen.logp = old_logps(rank)
        seen.updates = two_updates(rank, 0.1)
    return seen
