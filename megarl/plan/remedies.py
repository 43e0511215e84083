"""What makes a run fit where it does not: settings that spare memory, or GPUs, and cost time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megarl.config import OptimizerSettings, RunSettings, TrainConfig, optimizers

AWAY = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


def ways(config: RunSettings, gpus: int) -> list[RunSettings]:
    """The configuration as it is, and with one remedy and more of them, the quicker ones first.

    Args:
        config: of the run; of `megarl train` engines and ranks take turns from the start where there are too few GPUs for both.
        gpus: how many there are.
    """
    few = isinstance(config, TrainConfig) and gpus < config.layout.ranks + config.rollout.replicas * config.rollout.tp
    found = [sharing(config) if few else config]
    for remedy in (sharing, recomputed, offloaded):
        found += [tried for one in found if (tried := remedy(one)) not in found]
    return found


def sharing(config: RunSettings) -> RunSettings:
    """Engines take turns with the ranks on their GPUs, unless they are to respond while these learn."""
    if not isinstance(config, TrainConfig) or config.rollout.mode != "sync":
        return config
    transport = "cuda_ipc" if config.cluster.gpus else config.sync.transport
    placement, sync = config.placement.model_copy(update={"engines": "shared"}), config.sync.model_copy(update={"transport": transport})
    return config.model_copy(update={"placement": placement, "sync": sync})


def recomputed(config: RunSettings) -> RunSettings:
    """Of a layer's activations its input alone is kept."""
    return config.model_copy(update={"model": config.model.model_copy(update={"recompute": "full"})})


def offloaded(config: RunSettings) -> RunSettings:
    """The moments of every optimizer lie in host memory, where they are updated; of a model in float32 a check refuses that."""
    if config.model.dtype == "float32" or not config.cluster.gpus:
        return config

    def away(settings: OptimizerSettings) -> OptimizerSettings:
        return settings.model_copy(update={"megatron": {**settings.megatron, **AWAY}})

    changes: dict[str, Any] = {key: away(settings) for key, settings in optimizers(config).items() if key == "optimizer"}
    if isinstance(config, TrainConfig) and config.critic is not None:
        changes["critic"] = config.critic.model_copy(update={"optimizer": away(config.critic.optimizer)})
    return config.model_copy(update=changes)


def parked(config: RunSettings) -> RunSettings:
    """Models that share ranks take turns on the device."""
    if not isinstance(config, TrainConfig):
        return config
    return config.model_copy(update={"placement": config.placement.model_copy(update={"offload": True})})


def overrides(config: RunSettings, other: RunSettings) -> tuple[str, ...]:
    """What makes another configuration of one, as it is written on a command line."""
    return tuple(_differences(config.model_dump(mode="json"), other.model_dump(mode="json")))


def _differences(old: dict[str, Any], new: dict[str, Any], above: str = "") -> Iterator[str]:
    for key in [*new, *(key for key in old if key not in new)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{above}{key}.")
        elif before != after:
            yield f"{above}{key}={after if isinstance(after, str) else json.dumps(after)}"
