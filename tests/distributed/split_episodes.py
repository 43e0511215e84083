"""A step of the RL loop's own ranks on episodes whose contexts are samples of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from megarl.algorithms import Algorithm, PolicyAlgorithm
from megarl.batch import Sample
from megarl.config import CriticSettings, OptimizerSettings
from megarl.engines.episodes import chained
from megarl.observe.metrics import Metric, merge, scalars
from megarl.parallel.grid import Grid
from megarl.ranks.model_worker import ModelWorker
from megarl.ranks.step_plan import StepPlan, loss_weights, split_samples
from megarl.ranks.step_worker import RLSpec
from megarl.response import Response
from tests.distributed.loop_ranks import object_store, rl_rank
from tests.distributed.replayed_steps import Token, old_logps
from tests.distributed.tiny_training import TINY

# Of each episode its contexts: (tokens that are read, sampled tokens) of each.
SHAPES = [[(4, 6), (9, 5), (7, 8)], [(5, 9)], [(3, 4), (12, 6)], [(6, 11)]]
SMALL, LARGE = 21, 1000  # capacities of a micro-batch
REWARDS = np.array([1.0, 0.0, -0.5, 0.75], np.float32)


@dataclass(frozen=True)
class Case:
    """Two updates of a policy on the same responses."""

    path: Path
    algorithm: dict[str, Any]
    capacity: int = SMALL
    apart: bool = False  # every context is a response of its own


@dataclass
class Learned:
    """What one rank saw."""

    logp: dict[Token, float] = field(default_factory=dict)  # the old log-probs, on the ranks that report
    updates: list[dict[str, Metric]] = field(default_factory=list)
    divided: list[bool] = field(default_factory=list)


def episodes(apart: bool) -> list[Sample]:
    rng, made = np.random.default_rng(3), list[Sample]()
    for shape in SHAPES:
        words = [rng.integers(1, TINY["vocab_size"], read + said).astype(np.int32) for read, said in shape]
        own = [Sample(word, read, -rng.random(said).astype(np.float32), "stop") for word, (read, said) in zip(words, shape, strict=True)]
        made += own if apart else [chained(own)]
    return made


def plan_of(algorithm: PolicyAlgorithm, samples: list[Sample], dp: int, capacity: int) -> StepPlan:
    said = [Response(n, "", s.prompt_length, s.response_length, s.loss_tokens, True, s, 0, starts=s.starts) for n, s in enumerate(samples)]
    length_NC, everybody = [one.entries for one in said], list(range(len(said)))
    count_N = torch.tensor([one.loss_tokens for one in said])
    weight_N = loss_weights(algorithm, count_N, [everybody], torch.ones(len(said), dtype=torch.bool)).float().numpy()
    return StepPlan(
        payload_N=samples,
        experts_N=[None] * len(samples),
        stages=(),
        split=split_samples(length_NC, 1, dp, capacity),
        reward_N=np.resize(REWARDS, len(samples)),
        group_N=np.zeros(len(samples), int),
        keep_N=np.ones(len(samples), bool),
        weight_N=weight_N,
        value_weight_N=weight_N if algorithm.needs_critic else None,
        sample_S=[(n, context) for n, one in enumerate(length_NC) for context in range(len(one))],
        seed=11 if algorithm.selects else None,
    )


def two_updates(rank: ModelWorker, kl_coef: float) -> list[dict[str, Metric]]:
    """The metrics of two updates from the same responses, the critic's among them if there is one."""
    critic = "critic" in rank._models
    rank.advantages(np.asarray(REWARDS if critic else REWARDS - REWARDS.mean(), np.float32), kl_coef, False)
    return [(rank.update_critic(0) if critic else {}) | rank.update(0) for _ in range(2)]


def shown(ranks: Sequence[Any]) -> list[dict[str, float]]:
    """The numbers of each update, merged over the ranks."""
    return [scalars(merge(parts)) for parts in zip(*(seen.updates for seen in ranks), strict=True)]


def assert_same_updates(one: Any, ranks: Sequence[Any], names: Sequence[str], what: object = None) -> None:
    """Old log-probs and these numbers of both updates, where one rank has them, are those of one rank; ratios of the second are not 1."""
    assert {token: lp for seen in ranks for token, lp in seen.logp.items()} == pytest.approx(one.logp, abs=2e-5)
    expected = shown([one])
    assert expected[1]["actor/ppo_kl"] != 0
    for update, (first, second) in enumerate(zip(expected, shown(ranks), strict=True)):
        for name in names:
            if name in first:
                assert second[name] == pytest.approx(first[name], rel=(2e-4, 2e-3)[update], abs=1e-5), (what, update, name)


def learn(grid: Grid, case: Case) -> Learned:
    """The step of one rank."""
    algorithm: PolicyAlgorithm = TypeAdapter(Algorithm).validate_python(case.algorithm)
    critic = CriticSettings() if algorithm.needs_critic else None
    spec = RLSpec(algorithm, OptimizerSettings(lr=0.01), updates=100, temperature=1.0, critic=critic, critic_updates=100)
    rank = rl_rank(grid, case.path, spec, "policy", *(["critic"] if critic else []))
    seen = Learned()
    with object_store():
        plan = plan_of(algorithm, episodes(case.apart), grid.dp_size, case.capacity)
        rank.forward(plan)
        seen.logp, seen.divided = old_logps(rank), plan.divided
        if case.apart:
            return seen
        seen.updates = two_updates(rank, 0.0)
    return seen


def moved(logp: dict[Token, float]) -> dict[Token, float]:
    """The log-probs of contexts that are responses of their own, by episode and position in it."""
    found, response = dict[Token, float](), 0
    for n, shape in enumerate(SHAPES):
        place = 0
        for read, said in shape:
            found |= {(n, place + position): lp for (own, position), lp in logp.items() if own == response}
            place, response = place + read + said - 1, response + 1
    return found
