"""The host memory of a node, and what a step puts into Ray's object store."""

import json
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path

from megarl.config import AgentEnvironment, ConfigError, PromptFormat, RolloutSettings, TrainConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.data.turns import check_turns
from megarl.environments.checks import answering_role
from megarl.plan.devices import GB, MEAN_LENGTH
from megarl.plan.facts import Facts
from megarl.plan.parameters import stage_layers
from megarl.plan.ranks import GroupMemory

EXPERT = 2  # bytes of an expert's index on a rank: int16
RANK, ENGINE = 6 * GB, 8 * GB  # a process with torch, Megatron or vLLM, and CUDA's host memory: estimates


@dataclass(frozen=True)
class Payload:
    """What the engines of a run put into Ray's object stores, in bytes."""

    store: float  # size of each node's object store
    nodes: int  # with engines
    step: float  # from all engines, in one step
    batches: int  # how many steps' worth are held at once

    @property
    def warning(self) -> str | None:
        """A warning if the steps held at once exceed the object stores; else None."""
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
    """The host memory of a node, in bytes."""

    ranks: float  # processes
    staging: float  # checkpoints on their way to disk
    waiting: float  # models parked by placement.offload
    routes: float  # upper bound: routed experts of the step's tokens, which ranks hold from the old log-probs to the last update
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
    config: TrainConfig, policy: Facts, critic: Facts, groups: list[GroupMemory], engine_gpus: int, gpus: int, node: int, *, shared: bool
) -> NodeMemory:
    """Plan the busiest node: ranks on all its GPUs, and engines if they share these GPUs, or if it is the only node.

    Args:
        config: the run's configuration.
        policy: the policy.
        critic: the critic's model, or the policy's if it has none of its own.
        groups: the groups of ranks.
        engine_gpus: the number of GPUs of all engines.
        gpus: the number of GPUs of the run.
        node: the number of GPUs of a node.
        shared: whether engines are on the ranks' GPUs.
    """
    ranks = sum(group.layout.ranks for group in groups)
    node_ranks, node_engines = min(node, ranks), min(node, engine_gpus)
    stages = [stage for group in groups for stage in group.stages]
    waiting = max((stage.host or (stage.waiting if shared else 0)) + stage.offloaded for stage in stages)
    return NodeMemory(
        ranks=node_ranks * RANK,
        staging=node_ranks * (config.save.staging_mb << 20) if config.save.every or config.save.minutes else 0,
        waiting=node_ranks * waiting,
        routes=node_ranks * max(routes(config, policy, critic, group) for group in groups),
        engines=node_engines * ENGINE if shared or gpus <= node else 0,
        store=config.cluster.object_store_mb << 20,
        payload=payload(config, policy, node),
    )


def payload(config: TrainConfig, policy: Facts, node: int) -> Payload:
    """Return what the engines of a run put into the object stores.

    Args:
        config: the run's configuration.
        policy: the policy.
        node: the number of GPUs of a node.
    """
    rollout = config.rollout
    return Payload(
        store=config.cluster.object_store_mb << 20,
        nodes=-(-rollout.replicas * rollout.devices // node) if config.cluster.gpus else 1,
        step=_step(rollout, config.train.prompts_per_step, config.routing.reported, policy) * contexts(config),
        batches=batches(rollout.mode, rollout.max_lag),
    )


def contexts(config: TrainConfig) -> int:
    """The most contexts of a response, each of the greatest length.

    An agent may read a new one before every turn, and so does an episode where the chat template rewrites turns, or is not there to be
    asked; else there is one.
    """
    if config.environment is None:
        return 1
    role, arguments = answering_role(config.environment), json.dumps(config.data.template_args, default=str)
    rewrites = isinstance(config.environment.source, AgentEnvironment) or _rewrites(config.model.path, role, config.data.system, arguments)
    return min(config.environment.max_turns, config.rollout.max_response_tokens) if rewrites else 1


@lru_cache(maxsize=8)
def _rewrites(model: Path, role: str, system: str | None, arguments: str) -> bool:
    """Whether the chat template of a model may rewrite turns; the arguments are those of `check_turns` and its prompts."""
    try:
        data = PromptFormat(system=system, template_args=json.loads(arguments))
        return check_turns(load_tokenizer(model), [role], "environment", data)
    except ConfigError:
        return True


def routes(config: TrainConfig, policy: Facts, critic: Facts, group: GroupMemory) -> int:
    """The most bytes of routed experts that a rank of a group holds in a step, if all responses have the greatest length.

    A rank holds the experts of its own stage's layers, for all tokens of its responses, on each tensor-parallel and context-parallel rank
    alike. If only a sample is reported, each context in it brings a whole micro-batch, and all of them may be on one rank.

    Args:
        config: the run's configuration.
        policy: the policy.
        critic: the critic.
        group: the group of ranks.
    """
    roles, settings, train = group.name.split("+"), config.routing, config.train
    responses = train.prompts_per_step * config.rollout.samples_per_prompt
    parts = contexts(config)
    longest = parts * (config.rollout.max_prompt_tokens + config.rollout.max_response_tokens - 1)  # a context's last token is never fed
    tokens = train.mini_batches * -(-(responses // train.mini_batches) // group.layout.dp) * longest
    sampled = min(tokens, ceil(responses * settings.sample) * parts * train.micro_batch_tokens)

    def experts_each(model: Facts) -> list[int]:
        """The number of a token's routed experts on each stage."""
        stages = stage_layers(model.n.layers, group.layout, config.model.megatron)
        return [model.topk * sum(model.has_experts(layer) for piece in pieces for layer in piece) for pieces in stages]

    stage_experts = [0] * group.layout.pp
    if "policy" in roles:
        stage_experts = [each * (sampled if settings.replay == "off" else tokens) for each in experts_each(policy)]
    elif "reference" in roles and settings.replay == "r3" and settings.reference:
        stage_experts = [each * tokens for each in experts_each(policy)]
    if "critic" in roles and settings.critic:
        stage_experts = [one + each * tokens for one, each in zip(stage_experts, experts_each(critic), strict=True)]
    return max(stage_experts) * EXPERT


def batches(mode: str, max_lag: int | None) -> int:
    """The most steps' worth of responses held at once: the one that the ranks learn from, and those ahead of it."""
    return {"sync": 1, "ahead": 2, "budget": 3, "free": 2 + (max_lag or 0)}[mode]


def _step(rollout: RolloutSettings, prompts: int, reported: float, policy: Facts) -> float:
    """Bytes of the tokens and log-probs of all responses, and of their routed experts as far as these are reported."""
    tokens = (rollout.max_prompt_tokens + rollout.max_response_tokens) * MEAN_LENGTH
    experts = policy.n.mixtures * policy.topk * (1 if policy.n.experts <= 256 else 2) * reported
    return prompts * rollout.samples_per_prompt * tokens * (4 + 4 + experts)
