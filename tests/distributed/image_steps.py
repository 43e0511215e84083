"""A step of the RL loop's own ranks on responses with images, of which an episode has several contexts."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl  # noqa: F401  # which every rank would import
from pydantic import TypeAdapter

from megarl.algorithms import Algorithm, PolicyAlgorithm
from megarl.batch import Sample
from megarl.config import CriticSettings, LoraSettings, ModelSettings, OptimizerSettings, RoutingSettings, RunSettings
from megarl.engines.episodes import chained
from megarl.observe.metrics import Metric
from megarl.parallel.backend import choose
from megarl.parallel.grid import Grid
from megarl.ranks import assemble
from megarl.ranks.megatron_worker import RankSettings
from megarl.ranks.model_worker import ModelWorker
from megarl.ranks.step_plan import ScoringPlan, StepPlan, loss_weights, split_samples
from megarl.ranks.step_worker import RLSpec
from megarl.response import Response
from tests.distributed.replayed_steps import Token, old_logps
from tests.image_samples import samples

REWARDS = np.array([1.0, 0.0, -0.5, 0.75], np.float32)
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


def plan_of(algorithm: PolicyAlgorithm, own: list[Sample], stages: list[list[int]], dp: int, capacity: int) -> StepPlan:
    rng = np.random.default_rng(5)

    def experts(sample: Sample) -> list[list[np.ndarray]]:
        chosen = rng.random((len(sample.tokens) - 1 - len(sample.starts), 4, 4)).argsort(-1)[:, :, :2].astype(np.uint8)
        return [[chosen[:, stage] for stage in stages]]

    experts_N = [experts(sample) for sample in own] if stages else [None] * len(own)
    said = [Response(n, "", s.prompt_length, s.response_length, s.loss_tokens, True, s, 0, starts=s.starts) for n, s in enumerate(own)]
    length_NC = [one.entries for one in said]
    count_N, everybody = torch.tensor([one.loss_tokens for one in said]), list(range(len(said)))
    weight_N = loss_weights(algorithm, count_N, [everybody], torch.ones(len(said), dtype=torch.bool)).float().numpy()
    return StepPlan(
        payload_N=own,
        experts_N=experts_N,
        stages=stages,
        split=split_samples(length_NC, 1, dp, capacity),
        reward_N=REWARDS,
        group_N=np.zeros(len(own), int),
        keep_N=np.ones(len(own), bool),
        weight_N=weight_N,
        value_weight_N=weight_N if algorithm.needs_critic else None,
        sample_S=[(n, context) for n, one in enumerate(length_NC) for context in range(len(one))],
    )


def learn(grid: Grid, case: Case) -> Learned:
    """The step of one rank."""
    algorithm: PolicyAlgorithm = TypeAdapter(Algorithm).validate_python(case.algorithm)
    critic = CriticSettings() if algorithm.needs_critic else None
    config = RunSettings(name="x", model=ModelSettings(path=case.path, dtype="float32", lora=case.lora), layout=grid.layout)
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
    roles: list[Any] = ["policy", "reference", "reward", *(["critic"] if critic else [])]
    rank = ModelWorker(grid.rank, RankSettings.of(config, grid.layout), spec, roles)
    rank._backend, rank._grid = choose(), grid
    rank.build_models()
    seen, layers = Learned(), rank.moe_shape().layers
    size = layers // grid.layout.pp
    stages = [list(range(first, first + size)) for first in range(0, layers, size)] if case.replay == "r3" else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "ray", SimpleNamespace(get=list))
        own = episodes(case.path)
        own = own if case.images else [replace(sample, images=()) for sample in own]
        plan = plan_of(algorithm, own, stages, grid.dp_size, case.capacity)
        seen.scores = rank.rewards(ScoringPlan(own, [[[n] for n in range(4) if n % grid.dp_size == r] for r in range(grid.dp_size)]))
        seen.scored = rank.forward(plan)
        seen.logp = old_logps(rank)
        rank.advantages(np.asarray(REWARDS if critic else REWARDS - REWARDS.mean(), np.float32), 0.1, False)
        for _ in range(2):
            seen.updates.append((rank.update_critic(0) if critic else {}) | rank.update(0))
    return seen
