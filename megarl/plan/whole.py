"""The plan of a run: its groups of ranks, its engines, its nodes, its times, and whatever does not fit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from megarl.cluster.process_kinds import assign_roles
from megarl.config import DpoConfig, RmConfig, RunSettings, SupervisedConfig, TrainConfig, model_of
from megarl.engines.engine import SCORED_TOKENS, as_rollout
from megarl.engines.registry import check_engine
from megarl.errors import ConfigError
from megarl.models.description import ModelDescription
from megarl.models.families import check_layout, check_trainable_predictor
from megarl.plan.devices import GB, IMAGE_SHARE, IMAGE_TOKENS, MEAN_LENGTH, Device, of_engines
from megarl.plan.engines import EngineMemory, plan_engine
from megarl.plan.facts import facts
from megarl.plan.forward import active_parameters
from megarl.plan.host import NodeMemory, plan_host
from megarl.plan.parameters import language_elements, model_elements
from megarl.plan.ranks import GroupMemory, PlannedModel, Work, plan_group
from megarl.plan.remedies import offloaded, overrides, parked, quantized, recomputed, spread
from megarl.plan.sync import kept_bytes, receiver_bytes, sender_bytes, sent_bytes
from megarl.plan.times import StepTimes, micro_batches, plan_supervised, plan_times

ASLEEP = 2 * GB  # of a process on a GPU while another one uses it: CUDA's context, an engine's buffers

Models = Mapping[str, ModelDescription]


@dataclass(frozen=True)
class Plan:
    """What a run needs, in bytes and seconds, compared with what a GPU has."""

    architecture: str
    parameters: int
    active: float  # parameters that a token is multiplied with
    device: Device
    memory: float  # bytes of a GPU
    engine_memory: float  # bytes of a GPU of an engine
    gpus: int
    shared: bool  # whether engines and ranks take turns on the same GPUs
    groups: list[GroupMemory]
    engine: EngineMemory | None
    engines: int
    receiver: float  # bytes that a weight update takes on a GPU of an engine
    beside: float  # bytes of a rank that shares this GPU, meanwhile
    kept: float  # bytes that weight updates keep on a sender's GPU at all times
    host: NodeMemory | None
    times: StepTimes | None
    notes: list[str]  # assumptions that no run of this release meets
    faults: list[str]
    teachers: dict[str, EngineMemory] = field(default_factory=dict)  # those that are on engines of their own, by the setting that names one
    teaching: int = 0  # the GPUs of all of their engines

    @property
    def asleep(self) -> float:
        """Bytes that a process takes on a GPU while another one has its turn there."""
        return ASLEEP if self.shared else 0

    @property
    def update(self) -> float:
        """Bytes in use on a GPU of an engine during a weight update."""
        if self.engine is None:
            return 0
        occupied = self.engine.weights + self.engine.overhead + self.beside if self.shared else self.engine_memory * self.engine.share
        return occupied + self.receiver

    @property
    def need(self) -> float:
        """Bytes that a GPU must have for ranks and engines to fit on it."""
        needs = [group.worst.total + self.asleep for group in self.groups]
        if self.engine is not None:
            one = self.engine.weights + self.engine.overhead + self.engine.sequence(self.engine.longest)
            needs += [one / self.engine.share, self.update if self.shared else self.receiver / (1 - self.engine.share)]
        needs += [(one.weights + one.overhead + one.sequence(one.longest)) / one.share for one in self.teachers.values()]
        return max(needs)


def models_of(config: RunSettings) -> Models:
    """Read the policy's config.json, as "model", and that of each role with another model, by role. Raises ConfigError."""
    read = partial(ModelDescription.read, drop_images=config.model.drop_images)
    models = {"model": read(config.model.path, mtp="train" if config.model.mtp == "train" else "drop")}
    check_trainable_predictor(models["model"])
    if isinstance(config, TrainConfig):
        if config.critic is not None and config.critic.path is not None:
            models["critic"] = read(config.critic.path)
        if config.distillation is not None:
            models |= {name: read(path) for name, path in config.distillation.models.items()}
        if (judge := model_of(config.reward.source)) is not None:
            models["reward"] = read(judge[1].path)
    return models


def build(
    config: RunSettings,
    models: Models,
    device: Device,
    memory_gb: float,
    gpus: int | None = None,
    *,
    remedies: bool = True,
    mean_length: float = MEAN_LENGTH,
) -> Plan:
    """Plan a run.

    Args:
        config: the configuration of `megarl train`, or of a supervised stage.
        models: the result of `models_of`.
        device: the GPU from whose speed the times are computed, and with it those of the engines, if they are of another kind.
        memory_gb: the memory of each GPU, but for engines of another kind.
        gpus: the number of GPUs; None: as many as the configuration asks for.
        remedies: whether a rank that does not fit is also planned with settings that save memory; its fault then says what it would need.
        mean_length: of a prompt and of a response, as a share of the longest, from which the times are computed.

    Raises:
        ConfigError: a layout that does not divide a model.
    """
    model, memory = models["model"].trunk, memory_gb * GB
    engine_device, engine_gb = of_engines(device, memory_gb)
    groups = _groups(config, models)
    engine = receiver = host = None
    apart, teaching = dict[str, EngineMemory](), 0
    engines, beside, update_bytes, shared = 0, 0.0, 0, False
    policy, elements = facts(models["model"]), language_elements(model)
    needed_gpus = sum(group.layout.ranks for group in groups)
    offloaded = max(stage.offloaded for group in groups for stage in group.stages)
    if isinstance(config, TrainConfig):
        dtype, shared = config.rollout.dtype or config.model.dtype, config.placement.engines == "shared"
        # The plan is one for GPUs, also of a configuration for a CPU, whose engines need kv_cache_mb.
        rollout = config.rollout if config.cluster.gpus else config.rollout.model_copy(update={"kv_cache_mb": None, "speculative": None})
        check_engine(model, dtype, rollout, gpu=True)
        engine, engines = plan_engine(model, config.rollout, dtype, engine_gb * GB), config.rollout.replicas * config.rollout.devices
        receiver = receiver_bytes(model, config.sync, dtype, config.rollout, config.senders)
        if shared:  # a rank sends from a GPU on which an engine receives
            receiver += _sender_bytes(config, model)
            beside = max(stage.sending for stage in groups[0].stages)
            update_bytes = kept_bytes(model, config.sync, config.model.dtype)
        else:
            needed_gpus += engines
        apart = _teachers(config, models, memory)
        if (scoring := config.placement.teacher_engines) is not None:
            teaching = len(apart) * scoring.replicas * scoring.tp
        needed_gpus += teaching
        host = plan_host(config, policy, facts(models.get("critic", model)), groups, engines, needed_gpus, device.node, shared=shared)
        stages = [stage for group in groups for stage in group.stages]
        # Of models that take turns out and in both for scoring and for the update; of ranks that leave the GPUs to the engines once.
        parked = max(2 * stage.host or (stage.waiting if shared else 0) for stage in stages)
        sent, ahead = sent_bytes(model, config.rollout, dtype), config.rollout.mode != "sync"
        distillation = config.distillation
        teachers = [] if distillation is None else [models[name] for name in distillation.models] or [model] * distillation.by_itself
        taught = [(facts(teacher), language_elements(teacher)) for teacher in teachers]
        times = plan_times(
            *(config, policy, elements, engine, device, parked, offloaded, sent, taught),
            ahead=ahead,
            engine_device=engine_device,
            mean_length=mean_length,
        )
    else:
        assert isinstance(config, SupervisedConfig)
        times = plan_supervised(config, policy, elements, device, offloaded)
    plan = Plan(
        architecture=model.architecture,
        parameters=model_elements(model) + (0 if (layer := policy.predictor) is None else layer.dense + layer.experts),
        active=active_parameters(policy, elements),
        device=device,
        memory=memory,
        engine_memory=engine_gb * GB,
        gpus=gpus if gpus is not None else needed_gpus,
        shared=shared,
        groups=groups,
        engine=engine,
        engines=engines,
        receiver=receiver or 0,
        beside=beside,
        kept=update_bytes,
        host=host,
        times=times,
        notes=[],
        faults=[],
        teachers=apart,
        teaching=teaching,
    )
    if isinstance(config, TrainConfig) and config.distillation is not None and (config.distillation.server or config.distillation.servers):
        plan.notes.append(f"distillation.{next(iter(config.distillation.scorers))}: a server scores beside the policy, in no more time")
    if model.sizes.vision is not None:
        plan.notes.append(
            f"images are {IMAGE_SHARE:.0%} of the tokens, of {IMAGE_TOKENS} tokens each, and in the fullest micro-batch all; the vision "
            "tower is whole on each rank of the first stage, and the times have no backward pass of it"
        )
    if device.engines is not None:
        plan.notes.append(f"engines have {device.engines.name}; a run itself chooses nodes by their free GPUs, of whatever kind these are")
    if engine is not None and engine.tp > engine_device.node:
        plan.notes.append(
            f"rollout.tp={engine.tp}: nodes of more than {engine_device.node} GPUs, since the tp GPUs of a data-parallel rank are on one "
            "node; rollout.dp may span nodes"
        )
    plan.faults.extend(_faults(plan, needed_gpus, config if remedies else None, models))
    room = config.cluster.host_memory_gb
    if host is not None and room is not None and host.total > room * GB:
        plan.faults.append(f"cluster.host_memory_gb={room:g}: {host.needs}")
    return plan


def _groups(config: RunSettings, models: Models) -> list[GroupMemory]:
    if isinstance(config, TrainConfig):
        return [_train_group(config, models, roles, layout) for roles, layout in assign_roles(config)]
    assert isinstance(config, SupervisedConfig)
    check_layout(models["model"], config.layout, config.model.megatron)
    tokens = config.supervised.micro_batch_tokens
    value = isinstance(config, RmConfig)
    roles = [PlannedModel("model", models["model"], config.optimizers["optimizer"], value=value, micro_batch_tokens=tokens)]
    if isinstance(config, DpoConfig) and config.algorithm.needs_reference:
        roles.append(PlannedModel("reference", models["model"], None, value=False, micro_batch_tokens=tokens))
    work = Work(config.supervised.max_tokens, max(1, config.supervised.batch_size // config.layout.dp), 0)
    return [plan_group(roles, config.layout, config.model, work)]


def _train_group(config: TrainConfig, models: Models, names: tuple[str, ...], layout: Any) -> GroupMemory:
    roles, taught = [], [] if config.distillation is None else config.distillation.models
    for name in chain.from_iterable(taught if role == "teacher" else (role,) for role in names):
        model, tokens = models.get(name, models["model"]), config.train.micro_batch_tokens
        check_layout(model, layout, config.model.megatron)
        if name == "critic" and config.critic is not None:
            tokens = config.critic.micro_batch_tokens or tokens
        optimizer = config.optimizers.get({"policy": "optimizer", "critic": "critic.optimizer"}.get(name, ""))
        roles.append(PlannedModel(name, model, optimizer, value=name in ("critic", "reward"), micro_batch_tokens=tokens))
    work = Work(
        longest=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        micro_batches=micro_batches(config.train, config.rollout, layout),
        sync_bytes=_sender_bytes(config, models["model"].trunk) if "policy" in names else 0,
        kept_bytes=kept_bytes(models["model"].trunk, config.sync, config.model.dtype) if "policy" in names else 0,
        senders=config.senders,
        offload=config.placement.offload,
        shared=config.placement.engines == "shared",
    )
    return plan_group(roles, layout, config.model, work)


def _teachers(config: TrainConfig, models: Models, memory: float) -> dict[str, EngineMemory]:
    """A GPU of each teacher's engines, by the setting that names the teacher; empty if they are on ranks or servers.

    The logits of the tokens that are scored together are there twice in float32, beside the model's own.
    """
    engines = config.placement.teacher_engines
    if engines is None or config.distillation is None:
        return {}
    settings = as_rollout(engines, config.rollout.max_prompt_tokens + config.rollout.max_response_tokens)
    settings = settings.model_copy(update={"max_num_seqs": max(SCORED_TOKENS, settings.max_num_seqs)})
    return {name: plan_engine(models[name], settings, engines.dtype or config.model.dtype, memory) for name in config.distillation.models}


def _sender_bytes(config: TrainConfig, model: ModelDescription) -> int:
    return sender_bytes(model, config.sync, config.model.dtype, fp8=config.rollout.quantization == "fp8")


def _faults(plan: Plan, needed_gpus: int, config: RunSettings | None, models: Models) -> list[str]:
    """A line for each thing that does not fit, with what it needs and what there is."""
    has = f"and a GPU has {plan.memory / GB:g} GB"
    faults = [
        f"layout: rank {stage.rank} (pipeline stage {stage.stage}) of {group.name} needs {(stage.total + plan.asleep) / GB:.1f} GB in the "
        f"phase '{stage.phase}', {has}{_remedies(plan, config, models, number) if config is not None else ''}"
        for number, group in enumerate(plan.groups)
        if (stage := group.worst).total + plan.asleep > plan.memory
    ]
    if plan.gpus < needed_gpus:
        what = "ranks" if (plan.shared or plan.engine is None) and not plan.teaching else "ranks and engines"
        faults.append(f"layout: {what} need {needed_gpus} GPUs, but there are {plan.gpus}")
    if plan.engine is not None:
        engine_faults = _engine_faults(plan, plan.engine)
        if engine_faults and isinstance(config, TrainConfig):
            engine_faults[0] += _engine_remedies(plan, config, models)
        faults += engine_faults
    faults += [
        f"distillation.{name}: on placement.teacher_engines.tp={one.tp}, weights {one.weights / GB:.1f} GB and buffers "
        f"{one.overhead / GB:.1f} GB leave {max(0, one.cache) / GB:.1f} of gpu_memory_fraction={one.share:g} of a GPU's "
        f"{plan.memory / GB:g} GB, and one context of {one.longest} tokens takes {one.sequence(one.longest) / GB:.1f} GB"
        for name, one in plan.teachers.items()
        if not one.room
    ]
    return faults


def _engine_remedies(plan: Plan, config: TrainConfig, models: Models) -> str:
    """The smallest engine of more GPUs that would fit, and whether one with quantised weights would."""

    def fits(tried: TrainConfig) -> bool:
        try:
            other = build(tried, models, plan.device, plan.memory / GB, remedies=False)
        except ConfigError:  # the model cannot be split so
            return False
        return other.engine is not None and not _engine_faults(other, other.engine)

    experts = facts(models["model"]).n.experts
    larger = next((tried for tried in spread(config) if fits(tried)), None) if experts else None
    fitting = [tried for tried in (larger, quantized(config)) if tried is not None and tried != config and fits(tried)]
    return "; it would fit with " * bool(fitting) + ", or with ".join(" ".join(overrides(config, tried)) for tried in fitting)


def _remedies(plan: Plan, config: RunSettings, models: Models, number: int) -> str:
    """What the worst rank of a group would need with each of the settings that save memory, and with all of them if that is less."""

    def needs(tried: RunSettings) -> float:
        return _groups(tried, models)[number].worst.total + plan.asleep

    now = needs(config)
    each = {" ".join(overrides(config, tried)): needs(tried) for tried in (parked(config), recomputed(config), offloaded(config))}
    savings = {how: size for how, size in each.items() if size < now}
    together = needs(parked(recomputed(offloaded(config))))
    if savings and together < min(savings.values()):
        savings["all of it"] = together
    return "; it would need " * bool(savings) + ", ".join(f"{size / GB:.1f} GB with {how}" for how, size in savings.items())


def _engine_faults(plan: Plan, engine: EngineMemory) -> list[str]:
    faults, memory = list[str](), plan.engine_memory
    share, has = memory * engine.share, f"and a GPU has {memory / GB:g} GB"
    contents = f"weights {engine.weights / GB:.1f} GB and buffers {engine.overhead / GB:.1f} GB"
    if not engine.room:
        faults.append(
            f"{engine.size}: {contents} leave "
            f"{max(0, engine.cache) / GB:.1f} of rollout.gpu_memory_fraction={engine.share:g} of a GPU's {memory / GB:g} GB, and one "
            f"sequence of {engine.longest} tokens takes {engine.sequence(engine.longest) / GB:.1f} GB of keys and values"
        )
    waits = ASLEEP + plan.kept
    if plan.shared and share + waits > memory:
        faults.append(
            f"rollout.gpu_memory_fraction={engine.share:g}: {share / GB:.1f} GB beside {waits / GB:.1f} GB of a rank that waits, {has}"
        )
    if plan.update > memory and plan.shared:
        faults.append(
            f"{engine.size}: in a weight update a GPU holds an engine's {contents}, a rank's weights {plan.beside / GB:.1f} GB and "
            f"{plan.receiver / GB:.1f} GB of buckets, {plan.update / GB:.1f} GB together, {has}"
        )
    elif plan.update > memory:
        faults.append(
            f"rollout.gpu_memory_fraction={engine.share:g}: a weight update takes {plan.receiver / GB:.1f} GB on a GPU of an engine beside "
            f"{share / GB:.1f} GB, {has}"
        )
    return faults
