"""Everything that can be refused before a process starts: model directory, layout, routing, reward function, transports."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from megarl.checkpoints.steps import HF, trusted
from megarl.checks.data import Data, check_data
from megarl.checks.memory import check_fits
from megarl.cluster.allocation import Allocation
from megarl.cluster.demand import demand
from megarl.cluster.machine import gpus_here
from megarl.cluster.placement import Node, NoRoom, ProcessKind, place
from megarl.config import (
    ClusterSettings,
    ConfigError,
    CriticSettings,
    Layout,
    ModelSettings,
    RolloutSettings,
    RoutingSettings,
    RunSettings,
    TrainConfig,
    ValueConfig,
    model_of,
    optimizers,
)
from megarl.data.gym import all_drawn
from megarl.data.tokenizer import check_same_tokenizer, load_tokenizer
from megarl.engines.registry import check_engine, engine_type
from megarl.errors import Absent, refuse_all
from megarl.host.unchecked import is_naming, where_present
from megarl.models import hf as directory
from megarl.models.arithmetic import differences
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, check_layout, check_room
from megarl.models.megatron_fields import check_fields, fixed_fields
from megarl.models.optimizer_fields import check_optimizer
from megarl.models.weight_map import HeadKind
from megarl.observe import writers
from megarl.parallel.toolchain import lacking
from megarl.resume.saving import check_resume
from megarl.rewards.scale import read_range
from megarl.rewards.sources import check as check_reward

SHARED_MEMORY, MIN_SHARED_MB = "/dev/shm", 32
MIN_FILES = 1024  # the default of every Linux, unless someone lowered it
NEEDS_GPUS = {"gloo": False, "shm": False, "nccl": True, "cuda_ipc": True}  # by transport


def check_model(config: RunSettings, head: HeadKind = "lm") -> ModelDescription:
    """Check that the checkpoint is complete and that the layout divides it; return the model. Raises ConfigError."""
    with where_present("the run's directory"):
        check_directory(config.run_dir, config.directory)
    model = check_checkpoint(config.model.path, head, drop_mtp=config.model.drop_mtp)
    check_layout(model, config.layout, config.model.megatron)
    check_fields(config.model.megatron, fixed_fields(model, config.model.dtype, config.layout))
    if config.model.megatron.get("gradient_accumulation_fusion") and (config.model.dtype == "float32" or not config.cluster.gpus):
        raise ConfigError("model.megatron.gradient_accumulation_fusion=True: needs cluster.gpus=true and model.dtype=bfloat16")
    for key, optimizer in optimizers(config).items():
        check_optimizer(key, optimizer)
        if optimizer.megatron.get("optimizer_cpu_offload") and (config.model.dtype == "float32" or not config.cluster.gpus):
            # hybrid_optimizer.py copies only the float32 main weights of a bfloat16 model, and only if they are on GPUs.
            raise ConfigError(f"{key}.megatron.optimizer_cpu_offload=True: needs cluster.gpus=true and model.dtype=bfloat16")
    with where_present("the weights"):
        check_weights(config.model, model, head)
    with where_present("the trackers"):
        writers.check(config.log)
    check_cluster(config.cluster, demand(config))
    return model


def check_directory(run_dir: Path, directory: Path) -> None:
    """ConfigError if the run's directory, which is inside `run_dir`, could not be created or written to."""
    there = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        key = "name" if run_dir.is_dir() else "run_dir"
        raise (Absent if there.is_dir() else ConfigError)(f"{key}: {directory}: {there} is not a writable directory")


def check_weights(settings: ModelSettings, model: ModelDescription, head: HeadKind) -> None:
    """Check `model.weights`, if it is given.

    Args:
        settings: the section `model`.
        model: the model of `model.path`.
        head: the head of the model that is trained.

    Raises:
        ConfigError: files of the checkpoint are missing or have other sizes, it holds no policy, or its policy does not fit the model that
            is trained.
    """
    if settings.weights is None:
        return
    if head != "lm":
        raise ConfigError(f"model.weights={settings.weights}: weights of a language model, and a model with a scalar head is trained here")
    if not settings.weights.is_dir():
        raise Absent(f"model.weights: no such directory: {settings.weights}")
    try:
        held = trusted(settings.weights).manifest.models
    except ConfigError as error:
        raise ConfigError(f"model.weights: {error}") from None
    if "policy" not in held:
        raise ConfigError(f"model.weights: {settings.weights} has no policy (it has {', '.join(sorted(held))})")
    for key, given in model.identity.items():
        if (saved := held["policy"][key]) != given:
            raise ConfigError(f"model.weights: {settings.weights}: {key} is {saved!r}, and model.path's is {given!r}")
    own = settings.weights / "policy" / HF
    if (own / directory.CONFIG).is_file():
        for key, (saved, given) in differences(ModelDescription.read(own), model).items():
            raise ConfigError(f"model.weights: {settings.weights}: {key} is {saved!r}, and model.path's is {given!r}")


def check_cluster(settings: ClusterSettings, kinds: Sequence[ProcessKind]) -> None:
    """Check this machine.

    Args:
        settings: the section `cluster`.
        kinds: the kinds of processes that the run starts.

    Raises:
        ConfigError: the machine lacks open files, shared memory, the network interface or, for a session of its own, GPUs or
            what Triton compiles its driver with.
    """
    if is_naming() and settings.allocation is not None:  # the limits of this machine are not the nodes'
        check_allocation(settings.allocation, settings, kinds)
        return
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < MIN_FILES:
        raise ConfigError(f"cluster: the open-file limit is {files} (ulimit -n); Ray and the engines need at least {MIN_FILES}")
    if os.path.isdir(SHARED_MEMORY) and (room := shutil.disk_usage(SHARED_MEMORY).free >> 20) < MIN_SHARED_MB:
        raise ConfigError(f"cluster: {SHARED_MEMORY} has {room} MB free; Ray and the engines need at least {MIN_SHARED_MB}")
    if settings.address is not None:
        return
    if settings.allocation is not None:
        check_allocation(settings.allocation, settings, kinds)
        return
    known = psutil.net_if_addrs()
    if settings.interface is not None and settings.interface not in known:
        raise ConfigError(f"cluster.interface={settings.interface}: not one of this machine's ({', '.join(sorted(known))})")
    if settings.gpus:
        check_gpus(kinds, gpus_here())
        if (lack := lacking()) is not None:
            raise ConfigError(f"cluster.gpus=true: {lack}")


def check_allocation(directory: Path, settings: ClusterSettings, kinds: Sequence[ProcessKind]) -> None:
    """Check that a job's nodes are what the run needs.

    Args:
        directory: the directory of the allocation.
        settings: the section `cluster`.
        kinds: the kinds of processes that the run starts.

    Raises:
        ConfigError: the allocation lacks GPUs for them, or its nodes could not reach each other.
    """
    allocation = Allocation.read(directory)
    if len(allocation.nodes) > 1 and settings.interface is None:
        nodes = len(allocation.nodes)
        raise ConfigError(f"cluster.interface: required on {nodes} nodes, which must reach each other (`ip -br address` lists those there)")
    if settings.gpus:
        try:
            place(kinds, [Node(name, sys.maxsize, allocation.gpus) for name in allocation.nodes[: allocation.needed]])
        except NoRoom as error:
            raise ConfigError(f"cluster.allocation: {error}") from None


def check_gpus(kinds: Sequence[ProcessKind], here: int) -> None:
    """ConfigError if the `here` GPUs of this machine are too few for the processes of a session on this machine alone."""
    if not here:
        raise ConfigError(
            "cluster.gpus=true: this machine has no GPU; what is to run on a cluster's is checked by "
            "`megarl slurm CONFIG.yaml --nodes N --gpus-per-node 8 --dry-run` (cluster.gpus=false is for small models on a CPU)"
        )
    try:
        place(kinds, [Node("this machine", sys.maxsize, here)])
    except NoRoom as error:
        raise ConfigError(f"cluster.gpus=true: {error}; cluster.address joins a cluster that has more") from None


def check_routing(model: ModelDescription, settings: ModelSettings, routing: RoutingSettings, critic: CriticSettings | None) -> None:
    """Check that routing replay, and the comparison of experts, could do what they are meant to.

    Args:
        model: the policy.
        settings: the section `model`.
        routing: the section `routing`.
        critic: the section `critic`, if there is one.

    Raises:
        ConfigError: a model whose experts are to be replayed has none, or replay or comparison has no access to the router's choices.
    """
    critic, megatron = critic if routing.critic else None, settings.megatron
    sinkhorn = "sinkhorn" in str(megatron.get("moe_router_load_balancing_type", ""))
    if routing.replay == "off" and not routing.critic:
        if routing.sample and (sinkhorn or megatron.get("moe_router_fusion")) and model.fields.get("num_moe_experts"):
            name = "moe_router_load_balancing_type" if sinkhorn else "moe_router_fusion"
            raise ConfigError(
                f"routing.sample={routing.sample:g}: model.megatron.{name}={megatron[name]!r}: no experts can be compared; give 0"
            )
        return
    replayed = [] if routing.replay == "off" else [(f"routing.replay={routing.replay}", "model.path", settings.path, model)]
    if critic is not None:
        own = ("model.path", settings.path) if critic.path is None else ("critic.path", critic.path)
        replayed.append(("routing.critic=true", *own, ModelDescription.read(own[1])))
    for key, where, path, its in replayed:
        if not its.fields.get("num_moe_experts"):
            raise ConfigError(f"{key}: {where}={path} is a {its.config['model_type']}, which has no experts")
    key = replayed[0][0]
    for name in ("moe_router_fusion", "moe_expert_capacity_factor"):
        if megatron.get(name):
            raise ConfigError(
                f"{key}: model.megatron.{name}={megatron[name]!r}: experts are then chosen, or dropped, where replay has no control"
            )
    if sinkhorn:
        raise ConfigError(f"{key}: model.megatron.moe_router_load_balancing_type=sinkhorn chooses experts for the batch as a whole")


def check_reported_experts(model: ModelDescription, rollout: RolloutSettings, routing: RoutingSettings) -> None:
    """Check that the engine can report which experts of a mixture it has chosen, if it has to.

    Args:
        model: the policy.
        rollout: the section `rollout`.
        routing: the section `routing`.

    Raises:
        ConfigError: it cannot; the message names the settings under which it need not.
    """
    if routing.reported and model.fields.get("num_moe_experts") and not engine_type(rollout).reports_experts:
        asks = "replay=r3" if routing.replay == "r3" else f"sample={routing.sample:g}"
        without = "routing.replay=r2 or off with routing.sample=0" if routing.replay == "r3" else "routing.sample=0"
        raise ConfigError(f"routing.{asks}: the engine {rollout.engine.type} does not report the experts that it chooses; give {without}")


def check_length(model: ModelDescription, rollout: RolloutSettings) -> None:
    """ConfigError if prompt and response together may exceed the model's context length."""
    prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
    check_room(model, prompt + response, f"rollout.max_response_tokens={response} with max_prompt_tokens={prompt}")


def check_stops(model: ModelDescription, rollout: RolloutSettings) -> None:
    """ConfigError if a token that should end responses is not in the model's vocabulary."""
    for token in rollout.stop_token_ids:
        if token >= model.vocab:
            raise ConfigError(f"rollout.stop_token_ids: {token} is not one of the model's {model.vocab} tokens")


def check_value_model(policy: ModelSettings, rollout: RolloutSettings, path: Path, key: str, layout: Layout) -> None:
    """Check a critic or reward model against the policy. It may be of another size.

    Args:
        policy: the section `model`.
        rollout: the section `rollout`, which has the lengths.
        path: the model's Hugging Face directory.
        key: the setting that named it.
        layout: the layout of the ranks that will hold it.

    Raises:
        ConfigError: starting with `key`: the model is incomplete, the layout does not divide it, its tokenizer differs from the policy's,
            or its context is too short.
    """
    model = check_checkpoint(path, head="value", key=key, drop_mtp=policy.drop_mtp)
    try:
        check_layout(model, layout, policy.megatron)
    except ConfigError as error:
        raise ConfigError(f"{key}: {path}: {error}") from None
    with where_present(f"the tokenizer of {key}"):
        check_same_tokenizer(path, key, policy.path, "model.path")
    check_room(model, rollout.max_prompt_tokens + rollout.max_response_tokens, f"{key}: {path}")


def check_trained_head(path: Path, key: str) -> None:
    """ConfigError if the directory holds a language model: the scores of a fresh head are meaningless."""
    model = ModelDescription.read(path)
    if model.head != "value":
        raise ConfigError(f"{key}: {path} is a {model.architecture}, but a reward model needs a trained scalar head (`megarl rm`)")


def check_train(config: TrainConfig, verb: str = "train") -> Data:
    """Make all checks of `megarl train`, or of another verb that does the same work; raise their faults all at once."""
    model, data = check_model(config), list[Data]()
    refuse_all(
        lambda: check_base(config, model),
        lambda: check_length(model, config.rollout),
        lambda: check_stops(model, config.rollout),
        lambda: check_routing(model, config.model, config.routing, config.critic),
        lambda: check_reported_experts(model, config.rollout, config.routing),
        lambda: check_transport(config.sync.transport, config.placement.engines, gpus=config.cluster.gpus),
        lambda: check_engine(model, config.rollout.dtype or config.model.dtype, config.rollout, gpu=config.cluster.gpus),
        lambda: check_models_beside(config, model),
        lambda: check_fits(config),
        lambda: check_reward(config.reward),
        lambda: data.append(check_data(config)),
    )
    if is_naming() and not data[0].train:
        return data[0]
    normalise = config.reward.normalise
    for key, wanted in (
        ("train.prompts_per_step", config.train.prompts_per_step),
        ("reward.normalise.prompts", 0 if normalise is None else normalise.prompts),
    ):
        if len(data[0].train) < wanted and all_drawn():
            raise ConfigError(f"{key}={wanted}: data.train holds {len(data[0].train)} prompts")
    check_resume(config, verb, len(data[0].train))
    return data[0]


def check_base(config: TrainConfig, model: ModelDescription) -> None:
    """Check `model.base`, from which the engines start: a sync replaces its weights, but all else stays with them for the whole run.

    Args:
        config: the run's configuration.
        model: the model of `model.path`.

    Raises:
        ConfigError: the model is incomplete, its shape is not the policy's, or its responses would end or be tokenised differently.
    """
    base, path = config.model.base, config.model.path
    if base is None:
        return
    its = check_checkpoint(base, key="model.base", drop_mtp=config.model.drop_mtp)
    if its.config["architectures"] != model.config["architectures"]:
        raise ConfigError(f"model.base: {base} has a different architecture from model.path={path}")
    left, right = _beside_weights(its), _beside_weights(model)
    for what in [*right, *left]:
        if left.get(what) != right.get(what):
            raise ConfigError(f"model.base: {what} is {left.get(what)!r} in {base} and {right.get(what)!r} in model.path={path}")
    check_room(its, config.rollout.max_prompt_tokens + config.rollout.max_response_tokens, f"model.base: {base}")
    with where_present("the tokenizer of model.base"):
        check_same_tokenizer(base, "model.base", path, "model.path")
        # The driver renders prompts from model.path; the engine's process renders an environment's messages from model.base.
        if config.environment is not None and load_tokenizer(base).chat_template != load_tokenizer(path).chat_template:
            raise ConfigError(f"model.base: its chat template, which renders what the environment says, is another than that of {path}")


def _beside_weights(model: ModelDescription) -> dict[str, Any]:
    """What an engine reads from a directory besides weights, by name: tensor shapes, model dimensions, tokens that end a response."""
    shapes = {f"the shape of {name}": list(shape) for name, shape in model.expected().items()}
    return {"eos_token_id": sorted(directory.end_tokens(model.directory)), **model.fields, **model.rope.meaning, **shapes}


def check_transport(transport: str, engines: str, *, gpus: bool) -> None:
    """Check that a weight transport works with the hardware and the placement.

    Args:
        transport: `sync.transport`.
        engines: `placement.engines`.
        gpus: `cluster.gpus`.

    Raises:
        ConfigError: it does not; the message names those that do.
    """
    if NEEDS_GPUS[transport] != gpus:
        fitting = ", ".join(name for name, needed in NEEDS_GPUS.items() if needed == gpus)
        raise ConfigError(f"sync.transport={transport} does not go with cluster.gpus={str(gpus).lower()} (these do: {fitting})")
    if transport == "cuda_ipc" and engines == "apart":
        raise ConfigError(
            "sync.transport=cuda_ipc: shares memory on one GPU, but ranks and engines have separate GPUs (use nccl, or "
            "placement.engines=shared)"
        )


def check_models_beside(config: TrainConfig, model: ModelDescription) -> None:
    """Check the critic, the reference and the reward model, if the run has them. `model`: the policy's."""
    if config.critic is not None:
        layout = config.placement.critic or config.layout
        if config.critic.path is None:
            check_layout(model, layout, config.model.megatron)
        else:
            check_value_model(config.model, config.rollout, config.critic.path, "critic.path", layout)
    if config.placement.reference is not None:
        check_layout(model, config.placement.reference, config.model.megatron)
    if (found := model_of(config.reward.source)) is not None:
        key, path, layout = f"{found[0]}.path", found[1].path, config.placement.reward or config.layout
        check_value_model(config.model, config.rollout, path, key, layout)
        check_trained_head(path, key)
        read_range(path, key)


def check_value(config: ValueConfig) -> Data:
    """Make all checks of `megarl value`; return its prompts."""
    if config.critic is None or config.critic.pretrain_steps == 0:
        raise ConfigError("critic.pretrain_steps: `megarl value` needs at least 1")
    data = check_train(config, "value")
    absent = is_naming() and config.data.eval is not None and not data.eval
    if not absent and len(data.eval) < config.train.prompts_per_step:
        raise ConfigError(
            f"train.prompts_per_step={config.train.prompts_per_step}: data.eval, the held-out prompts, has only {len(data.eval)}"
        )
    return data
