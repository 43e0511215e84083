"""The plan of a run: its groups of ranks, its engines, its nodes, its times, and what of it does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from megarl.cluster.demand import assign_roles
from megarl.config import DpoConfig, LearnConfig, RmConfig, RunSettings, TrainConfig, model_of, optimizers
from megarl.models.families import check_layout
from megarl.models.hf import read_config
from megarl.plan.devices import GB, MEAN_LENGTH, NODE, Device
from megarl.plan.engines import EngineMemory, plan_engine
from megarl.plan.facts import facts
from megarl.plan.host import NodeMemory, plan_host
from megarl.plan.parameters import model_elements
from megarl.plan.ranks import GroupMemory, PlannedModel, Work, plan_group
from megarl.plan.sync import receiver_bytes, sender_bytes
from megarl.plan.times import StepTimes, active_parameters, micro_batches, plan_times
from megarl.rollout.registry import check_engine

ASLEEP = 2 * GB  # of a process on a GPU that another one uses: CUDA's context, an engine's buffers

Models = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """What a run needs, in bytes and seconds, against what a GPU has."""

    architecture: str
    parameters: int
    active: float  # of them in the product with a token
    device: Device
    memory: float  # bytes of a GPU
    gpus: int
    shared: bool  # engines and ranks take turns on the same GPUs
    groups: list[GroupMemory]
    engine: EngineMemory | None
    engines: int
    receiver: float  # bytes of a weight update on a GPU of an engine
    beside: float  # of a rank that shares this GPU, meanwhile
    host: NodeMemory | None
    times: StepTimes | None
    notes: list[str]  # what is assumed, and no run of this release has
    faults: list[str]


def models_of(config: RunSettings) -> Models:
    """The config.json of each role's model that is not the policy's, and under "model" the policy's. Raises ConfigError."""
    found = {"model": read_config(config.model.path)}
    if isinstance(config, TrainConfig):
        if config.critic is not None and config.critic.path is not None:
            found["critic"] = read_config(config.critic.path)
        if (judge := model_of(config.reward.source)) is not None:
            found["reward"] = read_config(judge[1].path)
    return found


def build(config: RunSettings, models: Models, device: Device, memory_gb: float, gpus: int | None = None) -> Plan:
    """The plan of a run.

    Args:
        config: of `megarl train`, or of a supervised stage.
        models: of `models_of`.
        device: whose speed the times follow from.
        memory_gb: of each GPU.
        gpus: how many there are; None: as many as the configuration asks for. Where these are too few for ranks and engines apart, they are
            planned to share GPUs.

    Raises:
        ConfigError: a layout that does not divide a model.
    """
    hf, memory = models["model"], memory_gb * GB
    groups = _groups(config, models)
    engine = engines = receiver = host = times = None
    beside, taking_turns = 0.0, False
    its, elements = facts(hf), model_elements(hf)
    ranks = sum(group.layout.ranks for group in groups)
    asked = ranks
    if isinstance(config, TrainConfig):
        dtype = config.rollout.dtype or config.model.dtype
        check_engine(hf, dtype, config.rollout, gpu=True)
        engine, engines = plan_engine(hf, config.rollout, dtype, memory), config.rollout.replicas * config.rollout.tp
        receiver = receiver_bytes(hf, config.sync, dtype, config.rollout.tp)
        asked += engines
        taking_turns = config.placement.engines == "shared"
        shared = taking_turns or (gpus is not None and gpus < asked and max(ranks, engines) <= gpus)
        asked = ranks if taking_turns else asked
        if shared:  # rank 0 sends from a GPU that an engine receives on
            receiver += sender_bytes(hf, config.sync, config.model.dtype)
            beside = max(stage.resident if taking_turns else stage.weights for stage in groups[0].stages)
        nodes = -(-(max(ranks, engines) if shared else asked) // NODE)
        host = plan_host(config, its, facts(models.get("critic", hf)), groups, engines, nodes, shared=shared)
        waiting = max(stage.host for group in groups for stage in group.stages)
        times = plan_times(config, its, elements, engine, device, waiting, ahead=config.rollout.mode != "sync" and not shared)
    else:
        shared = False
    plan = Plan(
        architecture=hf["architectures"][0],
        parameters=elements,
        active=active_parameters(its, elements),
        device=device,
        memory=memory,
        gpus=gpus if gpus is not None else asked,
        shared=shared,
        groups=groups,
        engine=engine,
        engines=engines or 0,
        receiver=receiver or 0,
        beside=beside,
        host=host,
        times=times,
        notes=[],
        faults=[],
    )
    plan.notes.extend(_notes(plan, taking_turns))
    plan.faults.extend(_faults(plan, asked))
    room = config.cluster.host_memory_gb
    if host is not None and room is not None and host.total > room * GB:
        plan.faults.append(f"cluster.host_memory_gb={room:g}: {host.needs}")
    return plan


def _notes(plan: Plan, taking_turns: bool) -> list[str]:
    found = []
    if plan.shared and not taking_turns:
        found.append(
            f"engines and ranks take turns on {plan.gpus} GPUs, gradients and optimizer leave them in a weight update: more than "
            "placement.engines=shared does so far; apart, they need more GPUs"
        )
    if plan.engine is not None and plan.engine.tp > NODE:
        found.append(f"rollout.tp={plan.engine.tp} reaches over nodes of {NODE} GPUs, and an engine starts on one node alone: a plan only")
    return found


def _groups(config: RunSettings, models: Models) -> list[GroupMemory]:
    if isinstance(config, TrainConfig):
        return [_train_group(config, models, roles, layout) for roles, layout in assign_roles(config)]
    assert isinstance(config, LearnConfig)
    check_layout(models["model"], config.layout, config.model.megatron)
    tokens = config.learn.micro_batch_tokens
    away = optimizers(config)["optimizer"].offloaded
    roles = [
        PlannedModel("model", models["model"], trained=True, value=isinstance(config, RmConfig), micro_batch_tokens=tokens, offloaded=away)
    ]
    if isinstance(config, DpoConfig):
        roles.append(PlannedModel("reference", models["model"], trained=False, value=False, micro_batch_tokens=tokens))
    work = Work(config.learn.max_tokens, max(1, config.learn.batch_size // config.layout.dp), 0)
    return [plan_group(roles, config.layout, config.model, work)]


def _train_group(config: TrainConfig, models: Models, names: tuple[str, ...], layout: Any) -> GroupMemory:
    roles = []
    for name in names:
        hf, tokens = models.get(name, models["model"]), config.train.micro_batch_tokens
        check_layout(hf, layout, config.model.megatron)
        if name == "critic" and config.critic is not None:
            tokens = config.critic.micro_batch_tokens or tokens
        trained = {"policy": "optimizer", "critic": "critic.optimizer"}.get(name)
        away = optimizers(config)[trained].offloaded if trained else 0.0
        roles.append(
            PlannedModel(name, hf, trained is not None, value=name in ("critic", "reward"), micro_batch_tokens=tokens, offloaded=away)
        )
    work = Work(
        longest=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        micro_batches=ceil(micro_batches(config.train, config.rollout, layout) / MEAN_LENGTH),  # all responses of the greatest length
        sync_bytes=sender_bytes(models["model"], config.sync, config.model.dtype) if "policy" in names else 0,
        offload=config.placement.offload,
    )
    return plan_group(roles, layout, config.model, work)


def _faults(plan: Plan, asked: int) -> list[str]:
    """A line for each thing that does not fit, with both numbers."""
    has = f"and a GPU has {plan.memory / GB:g} GB"
    asleep = ASLEEP if plan.shared else 0
    found = [
        f"layout: rank {stage.rank} (pipeline stage {stage.stage}) of {group.name} needs {(stage.total + asleep) / GB:.1f} GB in the phase "
        f"'{stage.phase}', {has}"
        for group in plan.groups
        if (stage := group.worst).total + asleep > plan.memory
    ]
    if plan.gpus < asked and not plan.shared:
        found.append(f"layout: ranks and engines ask for {asked} GPUs, and there are {plan.gpus}")
    if plan.engine is not None:
        found += _engine_faults(plan, plan.engine, has)
    return found


def _engine_faults(plan: Plan, engine: EngineMemory, has: str) -> list[str]:
    found, share = [], plan.memory * engine.share
    if engine.cache < engine.token * engine.longest:
        found.append(
            f"rollout.tp={engine.tp}: weights {engine.weights / GB:.1f} GB and buffers {engine.overhead / GB:.1f} GB leave "
            f"{max(0, engine.cache) / GB:.1f} of rollout.gpu_memory_fraction={engine.share:g} of a GPU's {plan.memory / GB:g} GB, and one "
            f"sequence of {engine.longest} tokens takes {engine.token * engine.longest / GB:.1f} GB of keys and values"
        )
    if plan.shared and share + ASLEEP > plan.memory:
        found.append(
            f"rollout.gpu_memory_fraction={engine.share:g}: {share / GB:.1f} GB beside {ASLEEP / GB:g} GB of a rank that waits, {has}"
        )
    update = engine.weights + engine.overhead + plan.beside + plan.receiver if plan.shared else share + plan.receiver
    if update > plan.memory:
        found.append(
            f"rollout.gpu_memory_fraction={engine.share:g}: a weight update takes {plan.receiver / GB:.1f} GB on a GPU of an engine beside "
            f"{(update - plan.receiver) / GB:.1f} GB, {has}"
        )
    return found
