"""Remedies for a run that does not fit: settings that save memory or GPUs, and cost time."""

import json
from collections.abc import Iterator
from typing import Any

from megarl.config import OptimizerSettings, RunSettings, TrainConfig

TIMES = (2, 4, 8, 16, 32)  # times as many data-parallel ranks of an engine
AWAY = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


def ways(config: RunSettings, gpus: int, *, apart: bool = False) -> list[RunSettings]:
    """Return the configuration as it is, and with one or more remedies, the quicker ones first.

    Args:
        config: the run's configuration. In `megarl train`, engines and ranks take turns from the start if there are too few GPUs for both.
        gpus: the number of GPUs.
        apart: whether they cannot take turns, since the engines' GPUs are of another kind.
    """
    few = not apart and isinstance(config, TrainConfig) and gpus < config.layout.ranks + config.rollout.replicas * config.rollout.devices
    configurations = [sharing(config) if few else config]
    for remedy in (recomputed, offloaded) if apart else (sharing, recomputed, offloaded):
        configurations += [tried for one in configurations if (tried := remedy(one)) not in configurations]
    return configurations


def sharing(config: RunSettings) -> RunSettings:
    """Let engines take turns with the ranks on the ranks' GPUs, unless engines must generate while the ranks learn."""
    if not isinstance(config, TrainConfig) or config.rollout.mode != "sync":
        return config
    transport = "cuda_ipc" if config.cluster.gpus else config.sync.transport
    placement, sync = config.placement.model_copy(update={"engines": "shared"}), config.sync.model_copy(update={"transport": transport})
    return config.model_copy(update={"placement": placement, "sync": sync})


def recomputed(config: RunSettings) -> RunSettings:
    """Keep only the input of each layer, and recompute its activations."""
    return config.model_copy(update={"model": config.model.model_copy(update={"recompute": "full"})})


def offloaded(config: RunSettings) -> RunSettings:
    """Keep and update the moments of every optimizer in host memory; not of a model in float32 or of Muon, where a check refuses this."""
    if config.model.dtype == "float32" or not config.cluster.gpus or any(one.muon for one in config.optimizers.values()):
        return config

    def away(settings: OptimizerSettings) -> OptimizerSettings:
        return settings.model_copy(update={"megatron": {**settings.megatron, **AWAY}})

    changes: dict[str, Any] = {key: away(settings) for key, settings in config.optimizers.items() if key == "optimizer"}
    if isinstance(config, TrainConfig) and config.critic is not None:
        changes["critic"] = config.critic.model_copy(update={"optimizer": away(config.critic.optimizer)})
    return config.model_copy(update=changes)


def spread(config: TrainConfig) -> Iterator[TrainConfig]:
    """Make engines of more GPUs, the smallest first, each with fewer whole experts; fewer engines, as long as there is one.

    Only for a model with experts.
    """
    rollout = config.rollout
    for times in TIMES:
        changes = {"dp": times * rollout.dp, "expert_parallel": True, "replicas": -(-rollout.replicas // times)}
        yield config.model_copy(update={"rollout": rollout.model_copy(update=changes)})


def quantized(config: TrainConfig) -> TrainConfig:
    """Hold the weights of linear layers and experts in float8 in the engines, which then sample from another policy than the ranks'."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"quantization": "fp8"})})


def parked(config: RunSettings) -> RunSettings:
    """Let models that share ranks take turns on the device."""
    if not isinstance(config, TrainConfig):
        return config
    return config.model_copy(update={"placement": config.placement.model_copy(update={"offload": True})})


def overrides(config: RunSettings, other: RunSettings) -> tuple[str, ...]:
    """The overrides, as written on a command line, that turn one configuration into another."""
    return tuple(_differences(config.model_dump(mode="json"), other.model_dump(mode="json")))


def _differences(old: dict[str, Any], new: dict[str, Any], above: str = "") -> Iterator[str]:
    for key in [*new, *(key for key in old if key not in new)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{above}{key}.")
        elif before != after:
            yield f"{above}{key}={after if isinstance(after, str) else json.dumps(after)}"
