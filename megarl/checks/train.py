"""What `megarl train` and `megarl value` refuse before a process starts: one list of checks, each of which takes what it checks."""

from megarl.checks.data import Data, PromptReader, check_data
from megarl.checks.memory import check_fits
from megarl.checks.model import check_length, check_model, check_stops
from megarl.checks.other_models import check_base, check_critic, check_reward_model, check_seen, check_shown, check_taught, check_teacher
from megarl.checks.routing import check_reported_experts, check_routing
from megarl.config import ConfigError, TrainConfig, ValueConfig, model_of
from megarl.data.gym import all_drawn
from megarl.engines.registry import check_engine, engine_type, missing_methods
from megarl.errors import refuse_all
from megarl.host.unchecked import is_naming
from megarl.models.description import ModelDescription
from megarl.models.families import check_layout
from megarl.resume.point import check_resume
from megarl.rewards.sources import check as check_reward

NEEDS_GPUS = {"gloo": False, "shm": False, "nccl": True, "cuda_ipc": True}  # by transport


def check_train(config: TrainConfig, verb: str = "train") -> Data:
    """Make all checks of `megarl train`, or of another verb that does the same work, in this order; return its prompts.

    Raises:
        ConfigError: the first fault of the model, the machine or the saved run; or all other faults at once.
    """
    settings, rollout, placement, gpus = config.model, config.rollout, config.placement, config.cluster.gpus
    model, reader, data = check_model(config), PromptReader.of(config), list[Data]()
    teaching = placement.teacher_engines or placement.teacher or config.layout
    refuse_all(
        lambda: check_base(settings, model, rollout, config.environment),
        lambda: check_length(model, rollout),
        lambda: check_stops(model, rollout),
        lambda: check_routing(model, settings, config.routing, config.critic),
        lambda: check_reported_experts(model, rollout, config.routing),
        lambda: check_transport(config.sync.transport, placement.engines, gpus=gpus),
        lambda: check_engine(model, rollout.dtype or settings.dtype, rollout, gpu=gpus),
        lambda: check_offered(config),
        lambda: check_adapters(config, model),
        lambda: check_critic(settings, model, rollout, config.critic, placement.critic or config.layout),
        lambda: check_layout(model, placement.reference or config.layout, settings.megatron),
        lambda: check_teacher(settings, model, rollout, config.distillation, teaching, gpu=gpus),
        lambda: check_reward_model(settings, rollout, model_of(config.reward.source), placement.reward or config.layout),
        lambda: check_fits(config),  # ranks and engines together: the plan of the whole run
        lambda: check_reward(config.reward),
        lambda: data.append(check_data(reader, config.data.train, config.data.eval, config.eval)),
    )
    [prompts] = data
    if is_naming() and not prompts.train:
        return prompts
    check_taught(config.distillation, prompts.train)
    check_shown(config, prompts.train)
    check_seen(config, model, prompts.train, [held_out.prompts for held_out in prompts.sets])
    normalise = config.reward.normalise
    check_count(prompts, "train.prompts_per_step", config.train.prompts_per_step)
    check_count(prompts, "reward.normalise.prompts", 0 if normalise is None else normalise.prompts)
    check_resume(config, verb, len(prompts.train))
    return prompts


def check_offered(config: TrainConfig) -> None:
    """Check that the engine has the methods that settings need. Raise ConfigError for the first of which it lacks some."""
    sync, rollout = config.sync, config.rollout
    needs = {
        "sync.overlap=true": ("receive_buckets", "load_received") if sync.overlap else (),
        f"sync.transport={sync.transport}": () if sync.transport == "shm" else ("connect",),
        "placement.engines=shared": ("sleep", "wake") if config.placement.engines == "shared" else (),
    }
    for setting, methods in needs.items():
        if missing := missing_methods(rollout, methods):
            raise ConfigError(f"{setting}: the engine {rollout.engine.type} has no {' and no '.join(missing)}")


def check_adapters(config: TrainConfig, model: ModelDescription) -> None:
    """Check `sync.adapters`. Raise ConfigError where engines have not been shown to compute with the run's adapters."""
    if not config.sync.adapters:
        return
    lora, rollout = config.model.lora, config.rollout
    if lora is None:
        raise ConfigError("sync.adapters=true: model.lora is null, and the run trains no adapters")
    engine_type(rollout).check_adapters(model, rollout.dtype or config.model.dtype, lora, gpu=config.cluster.gpus)
    given = {
        "rollout.dp*rollout.tp": (rollout.devices, 1),
        "rollout.quantization": (rollout.quantization, None),
        "rollout.mode": (rollout.mode, "sync"),
        "placement.engines": (config.placement.engines, "apart"),
        "model.weights": (config.model.weights, None),
        "model.base": (config.model.base, None),
    }
    for key, (value, taken) in given.items():
        if value != taken:
            raise ConfigError(f"sync.adapters=true: not with {key}={value}, which has not been shown")


def check_count(data: Data, key: str, count: int) -> None:
    """Check that `data.train` has as many prompts as are drawn at once.

    Args:
        data: the prompts.
        key: the setting that draws them.
        count: how many it draws.

    Raises:
        ConfigError: it has fewer.
    """
    if len(data.train) < count and all_drawn():
        raise ConfigError(f"{key}={count}: data.train holds {len(data.train)} prompts")


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
