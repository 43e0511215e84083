"""Host memory of a node, and what a step puts into Ray's object store."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megarl.config import RolloutSettings, TrainConfig
from megarl.plan.devices import GB, MEAN_LENGTH, NODE
from megarl.plan.facts import Facts
from megarl.plan.parameters import stage_layers
from megarl.plan.ranks import GroupMemory

EXPERT = 2  # bytes of an expert's number where a rank holds it: int16
RANK, ENGINE = 6 * GB, 8 * GB  # a process with torch, Megatron or vLLM, and CUDA's host memory: estimates


@dataclass(frozen=True)
class Payload:
    """What the engines of a run put into Ray's object stores, in bytes."""

    store: float  # of each node
    nodes: int  # with engines
    step: float  # of all engines, in a step
    batches: int  # steps' worth that are there at once

    @property
    def warning(self) -> str | None:
        """What is to be known where the steps that are there exceed the object stores."""
        together = self.step * self.batches
        if together <= self.store * self.nodes:
            return None
        return (
            f"cluster.object_store_mb={int(self.store) >> 20}: the responses of {self.batches} step{'s' * (self.batches > 1)} take "
            f"{together / GB:.1f} GB, more than {self.nodes} x {self.store / GB:.1f}: Ray writes the rest to disk; "
            f"{ceil(together / self.nodes / (1 << 20))} holds them"
        )


@dataclass(frozen=True)
class NodeMemory:
    """A node, in bytes."""

    ranks: float  # processes
    staging: float  # checkpoints on their way
    waiting: float  # models of placement.offload
    routes: float  # experts of the step's tokens, which the ranks hold from the old log-probs to the last update: at most
    engines: float
    store: float  # Ray's object store, as configured
    payload: Payload

    @property
    def total(self) -> float:
        return self.ranks + self.staging + self.waiting + self.routes + self.engines + self.store

    @property
    def needs(self) -> str:
        """What a node needs, in words."""
        parts = {"processes": self.ranks + self.engines, "checkpoint staging": self.staging, "waiting models": self.waiting}
        parts |= {"the experts of a step's tokens": self.routes, "the object store": self.store}
        return f"a node needs {self.total / GB:.0f} GB: " + ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items() if size)


def plan_host(
    config: TrainConfig, its: Facts, critic: Facts, groups: list[GroupMemory], engine_gpus: int, nodes: int, *, shared: bool
) -> NodeMemory:
    """The busiest node: ranks on all its GPUs, and engines where they share these, or where there is no other node.

    Args:
        config: of the run.
        its: the policy.
        critic: of its own or of the policy's shape.
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
        routes=here * max(routes(config, its, critic, group) for group in groups),
        engines=there * ENGINE if shared or nodes == 1 else 0,
        store=config.cluster.object_store_mb << 20,
        payload=payload(config, its),
    )


def payload(config: TrainConfig, its: Facts) -> Payload:
    """What the engines of a run put into the object stores."""
    rollout = config.rollout
    return Payload(
        store=config.cluster.object_store_mb << 20,
        nodes=-(-rollout.replicas * rollout.tp // NODE) if config.cluster.gpus else 1,
        step=_step(rollout, config.train.prompts_per_step, config.routing.reported, its),
        batches=batches(rollout.mode, rollout.max_lag),
    )


def routes(config: TrainConfig, its: Facts, critic: Facts, group: GroupMemory) -> int:
    """The most bytes of experts that a rank of a group holds in a step: where all responses have the greatest length.

    A rank has those of its own stage's layers, of all tokens of its responses on each tensor-parallel and context-parallel rank. Where a
    sample is reported, each response of it brings a micro-batch, and all may be on one rank.

    Args:
        config: of the run.
        its: facts of the policy.
        critic: facts of the critic.
        group: of ranks.
    """
    roles, settings, train = group.name.split("+"), config.routing, config.train
    asked = train.prompts_per_step * config.rollout.samples_per_prompt
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens - 1  # the last token is never fed
    tokens = train.mini_batches * -(-(asked // train.mini_batches) // group.layout.dp) * longest
    sampled = min(tokens, ceil(asked * settings.sample) * train.micro_batch_tokens)

    def chosen(model: Facts) -> list[int]:
        """A token's experts on each stage."""
        stages = stage_layers(model.n.layers, group.layout, config.model.megatron)
        return [model.topk * sum(model.has_experts(layer) for piece in pieces for layer in piece) for pieces in stages]

    held = [0] * group.layout.pp
    if "policy" in roles:
        held = [each * (sampled if settings.replay == "off" else tokens) for each in chosen(its)]
    elif "reference" in roles and settings.replay == "r3" and settings.reference:
        held = [each * tokens for each in chosen(its)]
    if "critic" in roles and settings.critic:
        held = [one + each * tokens for one, each in zip(held, chosen(critic), strict=True)]
    return max(held) * EXPERT


def batches(mode: str, max_lag: int | None) -> int:
    """Steps' worth of responses that are there at once, at most: what the ranks learn from, and what is ahead of them."""
    return {"sync": 1, "ahead": 2, "budget": 3, "free": 2 + (max_lag or 0)}[mode]


def _step(rollout: RolloutSettings, prompts: int, reported: float, its: Facts) -> float:
    """Tokens and log-probs of all responses, and their experts as far as they are reported."""
    layers = its.n.layers - its.n.dense if its.n.experts else 0
    tokens = (rollout.max_prompt_tokens + rollout.max_response_tokens) * MEAN_LENGTH
    experts = layers * its.topk * (1 if its.n.experts <= 256 else 2) * reported
    return prompts * rollout.samples_per_prompt * tokens * (4 + 4 + experts)
