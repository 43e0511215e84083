"""Loads models, optimizers and random states from a step directory."""

from collections.abc import Mapping
from typing import Any

from megarl.checkpoints.steps import SavedStep
from megarl.errors import ConfigError
from megarl.parallel.checkpoint import sharded, torch_dist
from megarl.parallel.checkpoint.rng import restore_random_states
from megarl.parallel.checkpoint.state import RANDOM, ModelState
from megarl.parallel.grid import Grid


def load(step: SavedStep, models: Mapping[str, ModelState], grid: Grid) -> None:
    """Load models, and the optimizers of those that have one, on any layout. Collective.

    Args:
        step: the step directory.
        models: by the name of their folder in it; their tensors are overwritten.
        grid: this rank's grid.

    Raises:
        ConfigError: on all ranks, for a model that the directory lacks, or holds with another family or size (the error names the key and
            both shapes) or without the requested optimizer.
    """
    for name, model in models.items():
        saved = _saved(step, name, model)
        model.wake()
        state: dict[str, Any] = {"model": sharded.model_state(model.chunks, grid)}
        if model.trainable is not None:
            state["optimizer"] = sharded.empty_optimizer_state(model.trainable, state["model"])
        allowed_extra = () if model.trainable is not None else ("optimizer.",) if model.description.predicts else ("optimizer.", "mtp.")
        torch_dist.read(step, name, state, model.description.vocab, allowed_extra, grid)
        if model.trainable is not None:
            sharded.put_optimizer(model.trainable, state["optimizer"], saved["optimizer"]["adam_step"])
            model.trainable.steps = saved["optimizer"]["steps"]


def load_random(step: SavedStep, grid: Grid) -> bool:
    """Set every random state of this process to the saved one. Collective.

    Returns:
        False if that is impossible: the layout differs (nothing is changed), or the hardware does (the device's states stay as they are).
    """
    if step.manifest.layout != grid.layout.model_dump():
        return False
    return restore_random_states(torch_dist.agreed(grid, lambda: step.read(f"{RANDOM}/{grid.rank:05d}.safetensors")))


def _saved(step: SavedStep, name: str, model: ModelState) -> Mapping[str, Any]:
    """What the manifest says about a model. Raises ConfigError if it cannot be the given model."""
    saved = step.manifest.models.get(name)
    if saved is None:
        raise ConfigError(f"checkpoint: {step.path} has no model {name!r}; it has {', '.join(sorted(step.manifest.models))}")
    for key, own in model.description.identity.items():
        if saved[key] != own:
            raise ConfigError(f"checkpoint: {step.path / name}: {key} is {saved[key]!r}, and the model's is {own!r}")
    if (model.lora is None) != ("lora" not in saved):
        own, given = ("all weights" if absent else "adapters alone" for absent in (model.lora is None, "lora" not in saved))
        raise ConfigError(f"checkpoint: {step.path / name} holds {given}, and the model saves {own} (model.lora)")
    if model.description.predicts and not saved.get("mtp"):
        raise ConfigError(f"checkpoint: {step.path / name} holds no multi-token prediction layer (model.mtp=train)")
    for key, value in (model.lora or {}).items():
        if (given := saved["lora"][key]) != value:
            what = "adapters of another base: its fingerprint" if key == "base" else f"model.lora.{key}"
            raise ConfigError(f"checkpoint: {step.path / name}: {what} is {given!r}, and the model's is {value!r}")
    if model.trainable is not None and saved["optimizer"] is None:
        raise ConfigError(f"checkpoint: {step.path / name} holds no optimizer: it was saved as a frozen model")
    if model.trainable is not None and model.trainable.muon != saved["optimizer"].get("muon", False):
        given, own = ("with Muon", "without") if not model.trainable.muon else ("without Muon", "with it")
        raise ConfigError(f"checkpoint: {step.path / name} was trained {given}, and the model is {own} (optimizer.muon)")
    return saved
