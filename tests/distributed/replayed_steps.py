"""Whole steps of the RL loop's own ranks on responses whose experts are known, and where their routers send each token.

The responses go through the real `RolloutWorker`, whose engine says what it is told. Axes: E experts.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.algorithms import PolicyAlgorithm
from megarl.algorithms.grpo import Grpo
from megarl.algorithms.ppo import Ppo
from megarl.batch import Sample
from megarl.config import CriticSettings, Layout, OptimizerSettings, RoutingSettings
from megarl.engines.episodes import Start
from megarl.engines.generate import Sampling
from megarl.engines.worker import ExpertsWanted, RolloutWorker, answered
from megarl.observe.metrics import Metric
from megarl.parallel.grid import Grid
from megarl.parallel.weights import unwrap
from megarl.ranks.model_worker import ModelWorker, MoeShape
from megarl.ranks.step_plan import StepPlan, loss_weights, members, split_step
from megarl.ranks.step_worker import RLSpec
from megarl.response import Response
from tests.distributed.loop_ranks import object_store, rl_rank
from tests.distributed.tiny_training import TINY
from tests.engines.backwards_engine import PLACE

LAYERS, EXPERTS, TOPK = 4, 8, 2
RESPONSES, LONGEST = 12, 40
CAPACITY = 60  # tokens of a micro-batch: three to a mini-batch of six responses, which no round of two stages divides
Token = tuple[int, int]  # response, position in it
Went = dict[Token, dict[int, frozenset[int]]]  # by layer


@dataclass(frozen=True)
class Case:
    """Steps of a policy, one rollout each."""

    path: Path
    routing: RoutingSettings
    rollouts: int = 1
    epochs: int = 1
    mini_batches: int = 2
    old_logp: Literal["forward", "rollout"] = "forward"
    rollout_logp: dict[Token, float] = field(default_factory=dict)  # of the engine; 0 where it is not said
    recompute: Literal["none", "full"] = "none"
    longest: bool = False  # every response is as long as it can be
    critic_together: int = 0  # micro-batches that a critic, which is watched then, takes as one; 0: there is none


@dataclass
class Seen:
    """What one rank saw."""

    scored: list[dict[str, Metric]] = field(default_factory=list)  # by rollout: metrics of the pass before the updates
    updates: list[list[dict[str, Metric]]] = field(default_factory=list)  # by rollout and update
    went: list[list[Went]] = field(default_factory=list)  # by rollout: that pass, then the updates
    members: list[list[int]] = field(default_factory=list)  # by mini-batch, its responses on this rank
    fetched: list[tuple[int, int | None]] = field(default_factory=list)  # (response, stage); None: the sample
    logp: dict[Token, float] = field(default_factory=dict)  # the old log-probs, on the ranks that report


@dataclass(frozen=True)
class Reference:
    """In the place of Ray's."""

    response: int
    stage: int | None
    value: Any


class Store:
    """In the place of Ray's object store: notes what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, int | None]] = []

    def get(self, references: Sequence[Reference]) -> list[Any]:
        self.fetched += [(one.response, one.stage) for one in references]
        return [one.value for one in references]


class Told:
    """An engine's responder that gives a sample for each prompt."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    async def all(self, requests: Sequence[Any], timeout_s: float) -> list[Sample]:
        return [self._samples[request.id[0]] for request in requests]


class Words:
    eos_token_id = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


def samples_of(rollout: int, rollout_logp: dict[Token, float], *, longest: bool = False) -> list[Sample]:
    """Responses of 6 to 40 tokens, or of 40. No two have the same token at a position; no router would choose their experts."""
    rng = np.random.default_rng(rollout)
    words = np.stack([rng.permutation(np.arange(1, TINY["vocab_size"]))[:RESPONSES] for _ in range(LONGEST)]).astype(np.int32)
    made = []
    for n in range(RESPONSES):
        length, prompt = int(rng.integers(LONGEST if longest else 6, LONGEST + 1)), int(rng.integers(1, 5))
        logp = np.array([rollout_logp.get((n, position), 0.0) for position in range(prompt - 1, length - 1)], np.float32)
        experts = rng.random((length - 1, LAYERS, EXPERTS)).argsort(-1)[:, :, :TOPK].astype(np.uint8)
        made.append(Sample(words[:length, n], prompt, logp, "stop", routed_experts=experts))
    return made


def carried(samples: Sequence[Sample], stages: Sequence[Sequence[int]]) -> list[Response]:
    """The responses with references to what the engine's process puts into the object store."""
    worker: Any = RolloutWorker("engine 0", PLACE, {}, Path(os.devnull))
    worker._responder, worker._tokenizer, worker._ends, worker._timeout_s = Told(samples), Words(), (), 1.0
    wanted = ExpertsWanted(stages, LAYERS, TOPK, share=1.0)
    starts = [Start(n, sample.tokens[: sample.prompt_length].tolist(), 0) for n, sample in enumerate(samples)]
    responses, *values = asyncio.run(worker.respond(starts, Sampling(1, 1.0, LONGEST, 0), wanted))
    each = 1 + len(stages)
    references = [Reference(place // each, place % each - 1 if place % each else None, value) for place, value in enumerate(values)]
    return answered(responses, references, wanted)


def plan_of(responses: Sequence[Response], stages: Sequence[Sequence[int]], algorithm: PolicyAlgorithm, dp: int, parts: int) -> StepPlan:
    """The plan of a step that learns from all of them, in groups of four."""
    count_N = torch.tensor([response.loss_tokens for response in responses])
    split = split_step([response.prompt_length + response.length - 1 for response in responses], parts, dp, CAPACITY)
    mini_batches = [members(mini_batch) for mini_batch in split]
    weight_N = loss_weights(algorithm, count_N, mini_batches, torch.ones(len(responses), dtype=torch.bool)).float().numpy()
    return StepPlan(
        payload_N=[response.payload for response in responses],
        experts_N=[response.experts for response in responses],
        stages=stages,
        split=split,
        reward_N=np.random.default_rng(1).normal(size=len(responses)).astype(np.float32),
        group_N=np.arange(len(responses)) // 4,
        keep_N=np.ones(len(responses), bool),
        weight_N=weight_N,
        value_weight_N=weight_N if algorithm.needs_critic else None,
    )


def stages_of(layout: Layout) -> list[list[int]]:
    """The layers of each pipeline stage: pieces of the stack are dealt out in turn."""
    pieces = layout.pp * (layout.vpp or 1)
    size = LAYERS // pieces
    return [
        [layer for piece in range(stage, pieces, layout.pp) for layer in range(size * piece, size * (piece + 1))]
        for stage in range(layout.pp)
    ]


class Watch:
    """Where a model's routers send each token, seen at their output: of forwards alone, and not of what a backward computes again."""

    def __init__(self, grid: Grid, chunks: Sequence[Any]) -> None:
        self._grid, self._known, self._here, self.went = grid, dict[tuple[int, int], int](), list[tuple[int, int]](), Went()
        for chunk in map(unwrap, chunks):
            chunk.register_forward_pre_hook(self._enter)
            chunk.register_forward_hook(lambda *_: self._here.clear())
            for part in chunk.modules():
                if isinstance(part, TopKRouter):
                    part.register_forward_hook(self._saw)

    def expect(self, samples: Sequence[Sample]) -> None:
        """These are the responses from now on."""
        self._known = {(p, token): n for n, sample in enumerate(samples) for p, token in enumerate(sample.tokens.tolist())}

    def take(self) -> Went:
        """What was seen since the last call."""
        self.went, went = {}, self.went
        return went

    def _enter(self, chunk: Any, inputs: tuple[Tensor, ...]) -> None:
        self._here = list(zip(inputs[1][0].tolist(), inputs[0][0].tolist(), strict=True))

    def _saw(self, router: TopKRouter, _: Any, output: tuple[Tensor, Tensor]) -> None:
        rows, first = len(output[1]), len(output[1]) * self._grid.tp_rank
        for (position, token), sent_E in zip(self._here[first : first + rows], output[1], strict=False):
            if (n := self._known.get((position, token))) is not None:
                layers = self.went.setdefault((n, position), {})
                assert router.layer_number - 1 not in layers, "a token comes once in a pass"
                layers[router.layer_number - 1] = frozenset(sent_E.nonzero()[:, 0].tolist())


def steps(grid: Grid, case: Case) -> Seen:
    """The steps of one rank."""
    critic = case.critic_together > 0
    algorithm: PolicyAlgorithm = Ppo() if critic else Grpo()
    spec = RLSpec(
        algorithm,
        OptimizerSettings(lr=0.01),
        updates=100,
        temperature=1.0,
        critic=CriticSettings() if critic else None,
        critic_updates=100,
        critic_micro_batches_joined=max(1, case.critic_together),
        routing=case.routing,
        old_logp=case.old_logp,
    )
    rank = rl_rank(grid, case.path, spec, "policy", *(["critic"] if critic else []), recompute=case.recompute)
    stages, store, seen = stages_of(grid.layout), Store(), Seen()
    assert rank.moe_shape() == MoeShape(grid.pp_rank, stages[grid.pp_rank], LAYERS, TOPK)
    watch = Watch(grid, rank._models["critic" if critic else "policy"].chunks)
    with object_store(store):
        for rollout in range(case.rollouts):
            samples = samples_of(rollout, case.rollout_logp, longest=case.longest)
            watch.expect(samples)
            store.fetched.clear()
            plan = plan_of(carried(samples, stages), stages, algorithm, grid.dp_size, case.mini_batches)
            seen.scored.append(rank.forward(plan, score=False))
            seen.went.append([watch.take()])
            seen.logp = old_logps(rank)
            reward_N, group_N = torch.tensor(plan.reward_N, dtype=torch.float64), torch.tensor(plan.group_N)
            rank.advantages(algorithm.advantages(reward_N, group_N, None).float().numpy(), 0.0, False)
            seen.updates.append([])
            for part in plan.trained * case.epochs:
                if critic:
                    rank.update_critic(part)
                seen.updates[-1].append(rank.update(part))
                seen.went[-1].append(watch.take())
            seen.members = [[n for members in mini_batch[grid.dp_rank] for n in members] for mini_batch in plan.split]
    seen.fetched = store.fetched
    return seen


def old_logps(rank: ModelWorker) -> dict[Token, float]:
    """At the loss tokens that this rank speaks for."""
    found: dict[Token, float] = {}
    for numbers, batch in zip(rank._members, rank._flat(), strict=True):
        here_T = (batch.mask_T & ~batch.extra_T["old_logp"].isnan()).nonzero().squeeze(1) if rank._reports_tokens else torch.empty(0).long()
        seq, position, logp = (value_T[here_T].tolist() for value_T in (batch.seq_T, batch.position_T, batch.extra_T["old_logp"]))
        found |= {(numbers[n], p): lp for n, p, lp in zip(seq, position, logp, strict=True)}
    return found
