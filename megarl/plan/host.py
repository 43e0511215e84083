"""Host memory of a node, and what a step puts into Ray's object store."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import RolloutSettings, TrainConfig
from megarl.plan.devices import GB, MEAN_LENGTH, NODE
from megarl.plan.facts import Facts
from megarl.plan.ranks import GroupMemory

RANK, ENGINE = 6 * GB, 8 * GB  # a process with torch, Megatron or vLLM, and CUDA's host memory: estimates


@dataclass(frozen=True)
class NodeMemory:
    """A node, in bytes."""

    ranks: float  # processes
    staging: float  # checkpoints on their way
    waiting: float  # models of placement.offload
    engines: float
    store: float  # Ray's object store, as configured
    step: float  # what the engines of all nodes put into the object stores in a step
    batches: int  # steps' worth that are there at once
    nodes: int  # with engines

    @property
    def total(self) -> float:
        return self.ranks + self.staging + self.waiting + self.engines + self.store

    @property
    def spills(self) -> bool:
        """Whether the steps that are there exceed the object stores."""
        return self.step * self.batches > self.store * self.nodes


def plan_host(config: TrainConfig, its: Facts, groups: list[GroupMemory], engine_gpus: int, nodes: int, *, shared: bool) -> NodeMemory:
    """The busiest node: ranks on all its GPUs, and engines where they share these, or where there is no other node.

    Args:
        config: of the run.
        its: the policy.
        groups: of ranks.
        engine_gpus: of all engines.
        nodes: of the run.
        shared: engines are on the ranks' GPUs.
    """
    ranks = sum(group.layout.ranks for group in groups)
    here, there = min(NODE, ranks), min(NODE, engine_gpus)
    stages = [stage for group in groups for stage in group.stages]
    waiting = max((stage.host or (stage.waiting if shared else 0)) + stage.offloaded for stage in stages)
    return NodeMemory(
        ranks=here * RANK,
        staging=here * (config.save.staging_mb << 20) if config.save.every else 0,
        waiting=here * waiting,
        engines=there * ENGINE if shared or nodes == 1 else 0,
        store=config.cluster.object_store_mb << 20,
        step=_step(config.rollout, config.train.prompts_per_step, config.routing.reported, its),
        batches=batches(config.rollout.mode, config.rollout.max_lag),
        nodes=-(-engine_gpus // NODE),
    )


def batches(mode: str, max_lag: int | None) -> int:
    """Steps' worth of responses that are there at once, at most: what the ranks learn from, and what is ahead of them."""
    return {"sync": 1, "ahead": 2, "budget": 3, "free": 2 + (max_lag or 0)}[mode]


def _step(rollout: RolloutSettings, prompts: int, reported: float, its: Facts) -> float:
    """Tokens and log-probs of all responses, and their experts as far as they are reported."""
    layers = its.n.layers - its.n.dense if its.n.experts else 0
    tokens = (rollout.max_prompt_tokens + rollout.max_response_tokens) * MEAN_LENGTH
    experts = layers * its.topk * (1 if its.n.experts <= 256 else 2) * reported
    return prompts * rollout.samples_per_prompt * tokens * (4 + 4 + experts)
