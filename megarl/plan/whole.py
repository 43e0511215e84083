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
from megarl.plan.remedies import offloaded, overrides, parked, recomputed
from megarl.plan.sync import kept_bytes, receiver_bytes, sender_bytes
from megarl.plan.times import StepTimes, active_parameters, micro_batches, plan_learning, plan_times
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
    kept: float  # of the weight updates on rank 0's GPU, at all times
    host: NodeMemory | None
    times: StepTimes | None
    notes: list[str]  # what is assumed, and no run of this release has
    faults: list[str]

    @property
    def asleep(self) -> float:
        """Bytes that a process takes of a GPU while another one has its turn on it."""
        return ASLEEP if self.shared else 0

    @property
    def update(self) -> float:
        """Bytes on a GPU of an engine in a weight update."""
        if self.engine is None:
            return 0
        held = self.engine.weights + self.engine.overhead + self.beside if self.shared else self.memory * self.engine.share
        return held + self.receiver

    @property
    def need(self) -> float:
        """Bytes of the GPU that ranks and engines would fit on."""
        needs = [group.worst.total + self.asleep for group in self.groups]
        if self.engine is not None:
            one = self.engine.weights + self.engine.overhead + self.engine.token * self.engine.longest
            needs += [one / self.engine.share, self.update if self.shared else self.receiver / (1 - self.engine.share)]
        return max(needs)


def models_of(config: RunSettings) -> Models:
    """The config.json of each role's model that is not the policy's, and under "model" the policy's. Raises ConfigError."""
    found = {"model": read_config(config.model.path)}
    if isinstance(config, TrainConfig):
        if config.critic is not None and config.critic.path is not None:
            found["critic"] = read_config(config.critic.path)
        if (judge := model_of(config.reward.source)) is not None:
            found["reward"] = read_config(judge[1].path)
    return found


def build(config: RunSettings, models: Models, device: Device, memory_gb: float, gpus: int | None = None, *, remedies: bool = True) -> Plan:
    """The plan of a run.

    Args:
        config: of `megarl train`, or of a supervised stage.
        models: of `models_of`.
        device: whose speed the times follow from.
        memory_gb: of each GPU.
        gpus: how many there are; None: as many as the configuration asks for.
        remedies: a rank that does not fit is planned anew with what would make it smaller, and its fault says what it then needs.

    Raises:
        ConfigError: a layout that does not divide a model.
    """
    hf, memory = models["model"], memory_gb * GB
    groups = _groups(config, models)
    engine = receiver = host = None
    engines, beside, kept, shared = 0, 0.0, 0, False
    its, elements = facts(hf), model_elements(hf)
    asked = sum(group.layout.ranks for group in groups)
    offloaded = max(stage.offloaded for group in groups for stage in group.stages)
    if isinstance(config, TrainConfig):
        dtype, shared = config.rollout.dtype or config.model.dtype, config.placement.engines == "shared"
        check_engine(hf, dtype, config.rollout, gpu=True)
        engine, engines = plan_engine(hf, config.rollout, dtype, memory), config.rollout.replicas * config.rollout.tp
        receiver = receiver_bytes(hf, config.sync, dtype, config.rollout.tp)
        if shared:  # rank 0 sends from a GPU that an engine receives on
            receiver += sender_bytes(hf, config.sync, config.model.dtype)
            beside = max(stage.resident for stage in groups[0].stages)
            kept = kept_bytes(hf, config.sync, config.model.dtype)
        else:
            asked += engines
        host = plan_host(config, its, facts(models.get("critic", hf)), groups, engines, -(-asked // NODE), shared=shared)
        waiting = max(stage.host for group in groups for stage in group.stages)
        times = plan_times(config, its, elements, engine, device, waiting, offloaded, ahead=config.rollout.mode != "sync")
    else:
        assert isinstance(config, LearnConfig)
        times = plan_learning(config, its, elements, device, offloaded)
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
        engines=engines,
        receiver=receiver or 0,
        beside=beside,
        kept=kept,
        host=host,
        times=times,
        notes=[],
        faults=[],
    )
    if engine is not None and engine.tp > NODE:
        plan.notes.append(f"rollout.tp={engine.tp} spans nodes of {NODE} GPUs, but an engine starts only on one node: a plan only")
    plan.faults.extend(_faults(plan, asked, config if remedies else None, models))
    room = config.cluster.host_memory_gb
    if host is not None and room is not None and host.total > room * GB:
        plan.faults.append(f"cluster.host_memory_gb={room:g}: {host.needs}")
    return plan


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
    if isinstance(config, DpoConfig) and config.algorithm.needs_reference:
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
        kept_bytes=kept_bytes(models["model"], config.sync, config.model.dtype) if "policy" in names else 0,
        offload=config.placement.offload,
    )
    return plan_group(roles, layout, config.model, work)


def _faults(plan: Plan, asked: int, config: RunSettings | None, models: Models) -> list[str]:
    """A line for each thing that does not fit, with both numbers."""
    has = f"and a GPU has {plan.memory / GB:g} GB"
    found = [
        f"layout: rank {stage.rank} (pipeline stage {stage.stage}) of {group.name} needs {(stage.total + plan.asleep) / GB:.1f} GB in the "
        f"phase '{stage.phase}', {has}{_remedies(plan, config, models, number) if config is not None else ''}"
        for number, group in enumerate(plan.groups)
        if (stage := group.worst).total + plan.asleep > plan.memory
    ]
    if plan.gpus < asked:
        what = "ranks" if plan.shared or plan.engine is None else "ranks and engines"
        found.append(f"layout: {what} need {asked} GPUs, but there are {plan.gpus}")
    if plan.engine is not None:
        found += _engine_faults(plan, plan.engine, has)
    return found


def _remedies(plan: Plan, config: RunSettings, models: Models, number: int) -> str:
    """What the worst rank of a group would need with each of the settings that spare memory, and with all of them where that is less."""

    def needs(tried: RunSettings) -> float:
        return _groups(tried, models)[number].worst.total + plan.asleep

    now = needs(config)
    each = {" ".join(overrides(config, tried)): needs(tried) for tried in (parked(config), recomputed(config), offloaded(config))}
    found = {how: size for how, size in each.items() if size < now}
    together = needs(parked(recomputed(offloaded(config))))
    if found and together < min(found.values()):
        found["all of it"] = together
    return "; it would need " * bool(found) + ", ".join(f"{size / GB:.1f} GB with {how}" for how, size in found.items())


def _engine_faults(plan: Plan, engine: EngineMemory, has: str) -> list[str]:
    found, share = [], plan.memory * engine.share
    held = f"weights {engine.weights / GB:.1f} GB and buffers {engine.overhead / GB:.1f} GB"
    if not engine.room:
        found.append(
            f"rollout.tp={engine.tp}: {held} leave "
            f"{max(0, engine.cache) / GB:.1f} of rollout.gpu_memory_fraction={engine.share:g} of a GPU's {plan.memory / GB:g} GB, and one "
            f"sequence of {engine.longest} tokens takes {engine.token * engine.longest / GB:.1f} GB of keys and values"
        )
    waits = ASLEEP + plan.kept
    if plan.shared and share + waits > plan.memory:
        found.append(
            f"rollout.gpu_memory_fraction={engine.share:g}: {share / GB:.1f} GB beside {waits / GB:.1f} GB of a rank that waits, {has}"
        )
    if plan.update > plan.memory and plan.shared:
        found.append(
            f"rollout.tp={engine.tp}: in a weight update a GPU holds an engine's {held}, a rank's {plan.beside / GB:.1f} GB and "
            f"{plan.receiver / GB:.1f} GB of buckets, {plan.update / GB:.1f} GB together, {has}"
        )
    elif plan.update > plan.memory:
        found.append(
            f"rollout.gpu_memory_fraction={engine.share:g}: a weight update takes {plan.receiver / GB:.1f} GB on a GPU of an engine beside "
            f"{share / GB:.1f} GB, {has}"
        )
    return found
