"""Megarl's way to Megatron's torch_dist files: Megatron's planning and torch's formats, with neither's processes, pickles or barriers.

Upstream's own save starts a manager process and forks a writer for every file (strategies/filesystem_async.py:54,257); its load unpickles
`.metadata` freely (`unpickle`). What is written here, Megatron's own `dist_checkpointing.load` reads.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megarl.checkpoints.files import Record, write_file
from megarl.checkpoints.steps import COMMON, Verified
from megarl.config import ConfigError
from megarl.parallel.grid import Grid
from megarl.parallel.sharded import Sharded
from megarl.parallel.staging import Location
from megarl.parallel.unpickle import METADATA, read_metadata

Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """Which tensors this rank writes of a model. It stays the same for all saves of a run."""

    items: list[WriteItem]
    metadata: Metadata | None  # of all ranks together, on rank 0
    all_items: list[list[WriteItem]]  # of each rank, on rank 0


def make_plan(state: Sharded, grid: Grid, known: Plan | None) -> tuple[Plan, list[Tensor]]:
    """The plan of a model's state and this rank's tensors in its order. Collective where no plan of an earlier save is `known`.

    A first plan is checked: every element of every tensor is written by exactly one rank.
    """
    sharded, _ = save_preprocess(state, validate_access_integrity=known is None)
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(flat), is_coordinator=grid.rank == 0)
    local = planner.create_local_plan()
    tensors = [planner.resolve_data(item) for item in local.items]
    if known is not None:
        assert [item.index for item in local.items] == [item.index for item in known.items], "the model has changed since its last save"
        return known, tensors
    gathered: list[Any] | None = [None] * grid.world if grid.rank == 0 else None
    dist.gather_object(local, gathered, group=grid.groups.control, group_dst=0)
    if gathered is None:
        return Plan(local.items, None, []), tensors
    _, metadata = planner.create_global_plan(gathered)
    return Plan(local.items, metadata, [plan.items for plan in gathered]), tensors


def write_metadata(folder: Path, plan: Plan, places: Iterable[Iterable[Location]]) -> dict[str, Record]:
    """Writes what makes the ranks' shards one checkpoint, on rank 0: `places` says where each rank's tensors lie, in its plan's order."""
    assert plan.metadata is not None
    stored = {
        item.index: _StorageInfo(place.file, place.offset, place.length)
        for items, found in zip(plan.all_items, places, strict=True)
        for item, place in zip(items, found, strict=True)
    }
    metadata = replace(plan.metadata, storage_data=stored)
    config = CheckpointingConfig("torch_dist", 1)
    common = io.BytesIO()
    torch.save({}, common)
    return {
        METADATA: write_file(folder / METADATA, pickle.dumps(metadata)),
        CONFIG_FNAME: write_file(folder / CONFIG_FNAME, json.dumps(vars(config)).encode()),
        COMMON: write_file(folder / COMMON, common.getvalue()),
    }


def read(step: Verified, model: str, state: Sharded, vocabulary: int, allowed_extra: tuple[str, ...], grid: Grid) -> Sharded:
    """Fills the tensors of `state` from a model of a step directory. Collective; each rank reads what it needs and nothing else.

    Raises ConfigError, on every rank, before anything is filled: a tensor that the checkpoint lacks or has in another shape (of a padded
    vocabulary the first `vocabulary` rows count), or one that no rank asks for and whose name does not begin with `allowed_extra`.
    """
    metadata = agreed(grid, lambda: read_metadata(step, model))
    sharded, _, factories = load_preprocess(state)
    flat, mapping, renamed = _replace_state_dict_keys_with_sharded_keys(sharded)
    _refuse(step.path / model, metadata, flat, vocabulary, allowed_extra, grid)
    tensors = mcore_to_pyt_state_dict(flat, is_loading=True)
    padded = {key: shards[0] for key, shards in flat.items() if shards[0].allow_shape_mismatch}
    agreed(grid, lambda: _fill(step.path / model, metadata, tensors, MCoreLoadPlanner(allow_shape_mismatch_sharded_tensors=padded)))
    unwrapped = {key: _unwrap_pyt_sharded_tensor(tensor) for key, tensor in tensors.items()}
    filled = _replace_sharded_keys_with_state_dict_keys(unwrapped, mapping, renamed)
    _restore_dict_types(filled, sharded)
    return apply_factory_merges(filled, factories)


def agreed(grid: Grid, call: Callable[[], Result]) -> Result:
    """call() on every rank. Collective: the first rank's ConfigError or OSError is raised on all of them, as a ConfigError."""
    result, fault = None, None
    try:
        result = call()
    except OSError as error:
        fault = f"checkpoint: {error.filename}: {error.strerror}"
    except ConfigError as error:
        fault = str(error)
    faults: list[str | None] = [None] * grid.world
    dist.all_gather_object(faults, fault, group=grid.groups.control)
    for fault in faults:
        if fault is not None:
            raise ConfigError(fault)
    return cast(Result, result)


def _fill(folder: Path, metadata: Metadata, tensors: Any, planner: MCoreLoadPlanner) -> None:
    reader = FileSystemReader(folder)
    planner.set_up_planner(tensors, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:  # torch.load, which here takes tensors alone
        raise ConfigError(f"checkpoint: {folder}: {type(error).__name__}: {' '.join(str(error).split())}") from None


def _refuse(
    folder: Path,
    metadata: Metadata,
    wanted: Mapping[str, list[ShardedTensor]],
    vocabulary: int,
    allowed_extra: tuple[str, ...],
    grid: Grid,
) -> None:
    stored = {key: tuple(entry.size) for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
    shapes = {key: (tuple(shards[0].global_shape), shards[0].allow_shape_mismatch) for key, shards in wanted.items()}
    every: list[Any] = [None] * grid.world
    dist.all_gather_object(every, shapes, group=grid.groups.control)
    asked = {key: shape for one in every for key, shape in one.items()}
    for key, (shape, padded) in sorted(asked.items()):
        if key not in stored:
            raise ConfigError(f"checkpoint: {folder} lacks {key} of shape {list(shape)}")
        same = stored[key] == shape
        if padded and stored[key][1:] == shape[1:]:
            same = same or min(stored[key][0], shape[0]) >= vocabulary
        if not same:
            raise ConfigError(f"checkpoint: {folder}: {key} has shape {list(stored[key])}, and the model's is {list(shape)}")
    extra = sorted(key for key in stored.keys() - asked.keys() if not key.startswith(allowed_extra))
    if extra:
        raise ConfigError(f"checkpoint: {folder} holds {extra[0]} of shape {list(stored[extra[0]])}, which the model lacks")
