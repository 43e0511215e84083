"""Loads models, optimizers and random states from a step directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.checkpoints.steps import Verified
from megarl.errors import ConfigError
from megarl.parallel.checkpoint import sharded, torch_dist
from megarl.parallel.checkpoint.rng import restore_random_states
from megarl.parallel.checkpoint.state import IDENTITY, RANDOM, Part
from megarl.parallel.grid import Grid


def load(step: Verified, parts: Mapping[str, Part], grid: Grid) -> None:
    """Gives the models (and optimizers, where a part has one) what a step directory holds of them, on any layout. Collective.

    Raises ConfigError, on all ranks: a model that the directory lacks, of another family or size (key and both shapes), or without the
    optimizer that is asked for.
    """
    for name, part in parts.items():
        saved = _saved(step, name, part)
        state: dict[str, Any] = {"model": sharded.model_state(part.chunks, grid)}
        if part.trainable is not None:
            state["optimizer"] = sharded.empty_optimizer_state(part.trainable, state["model"])
        allowed_extra = ("optimizer.",) if part.trainable is None else ()
        torch_dist.read(step, name, state, int(part.hf["vocab_size"]), allowed_extra, grid)
        if part.trainable is not None:
            sharded.put_optimizer(part.trainable, state["optimizer"], saved["optimizer"]["adam_step"])
            part.trainable.steps = saved["optimizer"]["steps"]


def load_random(step: Verified, grid: Grid) -> bool:
    """Sets every random state of this process to the one saved. False, and nothing done, where the layout is another. Collective."""
    if step.manifest.layout != grid.layout.model_dump():
        return False
    restore_random_states(torch_dist.agreed(grid, lambda: step.read(f"{RANDOM}/{grid.rank:05d}.safetensors")))
    return True


def _saved(step: Verified, name: str, part: Part) -> Mapping[str, Any]:
    """What the manifest says of a model. Raises ConfigError where the model at hand cannot be it."""
    saved = step.manifest.models.get(name)
    if saved is None:
        raise ConfigError(f"checkpoint: {step.path} has no model {name!r}; it has {', '.join(sorted(step.manifest.models))}")
    for key in IDENTITY:
        if saved[key] != part.hf[key]:
            raise ConfigError(f"checkpoint: {step.path / name}: {key} is {saved[key]!r}, and the model's is {part.hf[key]!r}")
    if part.trainable is not None and saved["optimizer"] is None:
        raise ConfigError(f"checkpoint: {step.path / name} holds no optimizer: it was saved as a frozen model")
    return saved
