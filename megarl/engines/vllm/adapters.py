"""Low-rank adapters in an engine (vLLM's LoRA): the files that it loads them from, and what it holds of them afterwards.

Only vLLM's own processes call `held_adapter`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError
from megarl.models.adapters import PEFT, PEFT_CONFIG, PEFT_WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megarl.config import LoraSettings
    from megarl.models.description import ModelDescription

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of the room for adapters (vllm/config/lora.py:27)
SHOWN = "qwen3"  # config.json's model_type of the models with whose adapters engines have been shown to compute


def check(model: ModelDescription, dtype: str, lora: LoraSettings, *, gpu: bool) -> None:
    """Implement `Engine.check_adapters`."""
    family = model.config["model_type"]
    if family != SHOWN:
        raise ConfigError(f"sync.adapters=true: has not been shown for {family}, only for {SHOWN}")
    if gpu or dtype != "float32":
        raise ConfigError("sync.adapters=true: has been shown on CPU engines in float32 alone (cluster.gpus, rollout.dtype)")
    if lora.targets is not None:
        raise ConfigError("sync.adapters=true: has been shown with adapters of all linear layers (model.lora.targets=null)")
    if lora.rank > RANKS[-1]:
        raise ConfigError(f"model.lora.rank={lora.rank}: with sync.adapters=true at most {RANKS[-1]}")


def arguments(rank: int, targets: list[str]) -> dict[str, Any]:
    """Return the arguments of an engine with one adapter.

    Args:
        rank: the adapter's.
        targets: the names of the adapted modules, as q_proj.
    """
    room = next(one for one in RANKS if one >= rank)
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1, "lora_target_modules": targets}


def write(folder: Path, weights: bytes, config: dict[str, Any]) -> None:
    """Write a PEFT directory: the content of its file of weights, and of adapter_config.json."""
    (folder / PEFT_WEIGHTS).write_bytes(weights)
    (folder / PEFT_CONFIG).write_text(json.dumps(config))


def held_adapter(model: nn.Module, targets: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors of the one adapter that a model computes with, by PEFT's names.

    Raises:
        NotImplementedError: it computes with another number of adapters, or the room beside a factor holds other numbers than 0.
    """
    manager: Any = model.lora_manager
    slots = [slot for slot, number in enumerate(manager.lora_index_to_id) if number is not None]
    if len(slots) != 1:
        raise NotImplementedError(f"{len(slots)} adapters are in use, not 1")
    [adapter] = manager.list_adapters().values()
    for path, layer in manager.modules.items():
        names = manager.packed_modules.get(path, [path])
        for name, a_1RI, b_1OR in zip(names, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            a_RI, b_OR, rank = a_1RI[slots[0], 0], b_1OR[slots[0], 0], adapter.rank
            if a_RI[rank:].any() or b_OR[:, rank:].any():
                raise NotImplementedError(f"{name}: numbers beyond the adapter's rank of {rank}")
            if name.rpartition(".")[2] in targets:
                yield f"{PEFT}{name}.lora_A.weight", a_RI[:rank]
                yield f"{PEFT}{name}.lora_B.weight", b_OR[:, :rank]
            elif a_RI.any() or b_OR.any():
                raise NotImplementedError(f"{name}: has an adapter, and is none of {', '.join(targets)}")
