"""Writes and reads Megatron's torch_dist files, without its processes, its pickles or its quadratic planning.

Upstream's save starts a manager process (strategies/filesystem_async.py:64), its load unpickles `.metadata`, which can run code
(torch/distributed/checkpoint/filesystem.py:930), and both compare each of a rank's tensors with those of all ranks (torch's
planner_helpers.py; strategies/torch.py:135): minutes for the experts of a large model. Megatron's own `dist_checkpointing.load`
reads what is written here.
"""

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from torch import Tensor

from megarl.checkpoints.steps import SavedStep
from megarl.errors import ConfigError
from megarl.parallel.checkpoint.dcp import ChunkFinder, open_shards
from megarl.parallel.checkpoint.index import Location, Shard, StoredTensor, check_cover, read_index
from megarl.parallel.checkpoint.sharded import Sharded
from megarl.parallel.grid import Grid
from megarl.text.display import one_line

Result = TypeVar("Result")
_READERS = 4  # threads of a rank that read files


@dataclass(frozen=True)
class SavePlan:
    """The shards of a model that are written, the same in all saves of a run."""

    mine: list[Shard]  # written by this rank
    ranks: list[list[Shard]]  # by each rank; only on rank 0


def make_plan(state: Sharded, grid: Grid, known: SavePlan | None) -> tuple[SavePlan, list[Tensor]]:
    """Decide which of a model's tensors this rank writes. Collective if no plan of an earlier save is `known`.

    In that case it checks that every element of every tensor is written by exactly one rank.

    Args:
        state: the model's state, see `sharded`.
        grid: this rank's grid.
        known: the plan of an earlier save of the model.

    Returns:
        The plan, and this rank's tensors in its order.
    """
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    assert not common, f"not sharded: {sorted(common)}"
    written = [leaf for leaf in nested_values(sharded) if is_main_replica(leaf.replica_id)]
    shards = [_shard(leaf) for leaf in written]
    tensors = [leaf.data.detach().view(shard.size) for leaf, shard in zip(written, shards, strict=True)]
    if known is not None:
        assert shards == known.mine, "the model has changed since its last save"
        return known, tensors
    ranks: list[Any] | None = [None] * grid.world if grid.rank == 0 else None
    dist.gather_object(shards, ranks, group=grid.groups.control, group_dst=0)
    if ranks is not None:
        try:
            check_cover(shard for rank in ranks for shard in rank)
        except ValueError as error:
            raise AssertionError(f"not written exactly once: {error}") from None
    return SavePlan(shards, ranks or []), tensors


def read(step: SavedStep, model: str, state: Sharded, vocabulary: int, allowed_extra: tuple[str, ...], grid: Grid) -> None:
    """Fill the tensors of `state`, in place, from a model in a step directory. Collective; each rank reads only what it needs.

    Args:
        step: the step directory.
        model: the name of the model's folder in it.
        state: see `sharded`.
        vocabulary: rows that a padded vocabulary must have at least; sizes may differ beyond them.
        allowed_extra: name prefixes of the stored tensors that may be left unread by all ranks.
        grid: this rank's grid.

    Raises:
        ConfigError: on every rank. Before anything is filled, for a tensor that the checkpoint lacks or has in another shape, or that no
            rank reads and `allowed_extra` does not allow; later, DamagedFile for a file that is damaged or cannot be read.
    """
    stored = agreed(grid, lambda: read_index(step, model))
    wanted = list(nested_values(load_preprocess(state)[0]))
    storages = {leaf.data.untyped_storage().data_ptr() for leaf in nested_values(state)}
    assert all(leaf.data.untyped_storage().data_ptr() in storages for leaf in wanted), "a factory of Megatron's copies its tensor"
    _refuse(step.path / model, stored, wanted, vocabulary, allowed_extra, grid)
    agreed(grid, lambda: _fill(step.path / model, stored, wanted))


def agreed(grid: Grid, call: Callable[[], Result]) -> Result:
    """Run call() on every rank. Collective: the error of the lowest rank that fails is raised on all of them, as a ConfigError."""
    result: Result | None = None
    fault: ConfigError | None = None
    try:
        result = call()
    except ConfigError as error:
        fault = error
    except Exception as error:  # otherwise the other ranks would wait for this one
        fault = ConfigError(f"checkpoint: {type(error).__name__}: {one_line(str(error))}")
    faults: list[ConfigError | None] = [None] * grid.world
    dist.all_gather_object(faults, fault, group=grid.groups.control)
    for fault in faults:
        if fault is not None:
            raise fault
    return cast(Result, result)


def _shard(leaf: ShardedTensor) -> Shard:
    """The shard of a leaf, without its data; the axes that Megatron puts before a tensor's own (layer, expert) have size 1."""
    size = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
    return Shard(leaf.key, tuple(leaf.global_shape), tuple(leaf.global_offset), size, leaf.dtype)


def _refuse(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    wanted: list[ShardedTensor],
    vocabulary: int,
    allowed_extra: tuple[str, ...],
    grid: Grid,
) -> None:
    stored = {key: tensor.shape for key, tensor in tensors.items()}
    every: list[Any] = [None] * grid.world
    dist.all_gather_object(
        every, {leaf.key: (tuple(leaf.global_shape), leaf.allow_shape_mismatch) for leaf in wanted}, group=grid.groups.control
    )
    shapes = {key: shape for one in every for key, shape in one.items()}
    for key, (shape, padded) in sorted(shapes.items()):
        if key not in stored:
            raise ConfigError(f"checkpoint: {folder} lacks {key} of shape {list(shape)}")
        same = stored[key] == shape
        if padded and stored[key][1:] == shape[1:]:
            same = same or min(stored[key][0], shape[0]) >= vocabulary
        if not same:
            raise ConfigError(f"checkpoint: {folder}: {key} has shape {list(stored[key])}, and the model's is {list(shape)}")
    extra = sorted(key for key in stored.keys() - shapes.keys() if not key.startswith(allowed_extra))
    if extra:
        raise ConfigError(f"checkpoint: {folder} holds {extra[0]} of shape {list(stored[extra[0]])}, which the model lacks")


@dataclass(frozen=True)
class _Copy:
    """A part of a stored chunk, to be copied into a part of one of this rank's tensors."""

    source: tuple[slice, ...]
    target: Tensor


@torch.no_grad()
def _fill(folder: Path, stored: Mapping[str, StoredTensor], wanted: list[ShardedTensor]) -> None:
    """Read every stored shard that overlaps a wanted tensor, once, a few at a time, and check its hash."""
    reads: dict[Location, tuple[str, tuple[int, ...], list[_Copy]]] = {}
    for leaf in wanted:
        shard, missing = _shard(leaf), leaf.data.numel()
        data = leaf.data.detach().view(shard.size)
        if leaf.allow_shape_mismatch:
            data.zero_()  # rows that pad the vocabulary here but not in the file
        for found, source, target in stored[leaf.key].overlaps(shard):
            copies = reads.setdefault(found.location, (leaf.key, found.size, []))[2]
            copies.append(_Copy(source, data[target]))
            missing -= copies[-1].target.numel()
        if missing and not leaf.allow_shape_mismatch:
            raise ConfigError(f"checkpoint: {folder}: {missing} elements of {leaf.key} are nowhere")
    parts = list[list[Location]]()
    for _, group in itertools.groupby(sorted(reads), key=lambda location: location.file):
        locations = list(group)
        step = -(-len(locations) // _READERS)  # each file in _READERS parts: there may be fewer files than threads
        parts += [locations[start : start + step] for start in range(0, len(locations), step)]
    finder = ChunkFinder()
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(lambda locations: _read_part(folder, locations, reads, finder), parts))


@torch.no_grad()
def _read_part(
    folder: Path, locations: list[Location], reads: Mapping[Location, tuple[str, tuple[int, ...], list[_Copy]]], finder: ChunkFinder
) -> None:
    with open_shards(folder / locations[0].file) as file:
        for location in locations:
            key, sizes, copies = reads[location]
            stored = finder.find(file, location, key)
            chunk = None if len(copies) == 1 and stored.read_into(copies[0].target) else stored.read()
            if tuple(stored.layout.shape) != sizes:
                raise ConfigError(f"checkpoint: {file.path}: {key} is {list(stored.layout.shape)}, declared {list(sizes)}")
            if chunk is not None:
                for copy in copies:
                    copy.target.copy_(chunk[copy.source])
