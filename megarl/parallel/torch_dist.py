"""Megatron's torch_dist files, written and read with neither its processes nor its pickles nor its quadratic planning.

Upstream's save starts a manager process and forks a writer for every file (strategies/filesystem_async.py:54,266), its load unpickles
`.metadata` freely (`unpickle`), and both compare each of a rank's tensors with all ranks' (strategies/torch.py:141; torch's
planner_helpers.py): minutes for the experts of a large model. What is written here, Megatron's own `dist_checkpointing.load` reads.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.checkpoints.files import Record, write_file
from megarl.checkpoints.steps import COMMON, Verified
from megarl.config import ConfigError
from megarl.parallel.grid import Grid
from megarl.parallel.sharded import Sharded
from megarl.parallel.staging import Location
from megarl.parallel.unpickle import METADATA, read_metadata

Result = TypeVar("Result")
_Place = tuple[str, int, int]  # file, offset, length
_READERS = 4  # threads of a rank that read files


@dataclass(frozen=True)
class Shard:
    """A piece of a tensor."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """What is written of a model. It stays the same for all saves of a run."""

    mine: list[Shard]
    ranks: list[list[Shard]]  # of each rank, on rank 0


def make_plan(state: Sharded, grid: Grid, known: Plan | None) -> tuple[Plan, list[Tensor]]:
    """The plan of a model's state and this rank's tensors in its order. Collective where no plan of an earlier save is `known`.

    Every element of every tensor is then known to be written by exactly one rank.
    """
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    assert not common, f"not sharded: {sorted(common)}"
    written = [leaf for leaf in nested_values(sharded) if is_main_replica(leaf.replica_id)]
    mine = [_shard(leaf) for leaf in written]
    tensors = [leaf.data.detach().view(shard.size) for leaf, shard in zip(written, mine, strict=True)]
    if known is not None:
        assert mine == known.mine, "the model has changed since its last save"
        return known, tensors
    ranks: list[Any] | None = [None] * grid.world if grid.rank == 0 else None
    dist.gather_object(mine, ranks, group=grid.groups.control, group_dst=0)
    if ranks is not None:
        _check_cover(shard for rank in ranks for shard in rank)
    return Plan(mine, ranks or []), tensors


def write_metadata(folder: Path, plan: Plan, places: Iterable[Iterable[Location]]) -> dict[str, Record]:
    """Writes what makes the ranks' shards one checkpoint, on rank 0: `places` says where each rank's tensors lie, in its plan's order."""
    tensors: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for rank, found in zip(plan.ranks, places, strict=True):
        for shard, place in zip(rank, found, strict=True):
            whole = TensorStorageMetadata(TensorProperties(dtype=shard.dtype), torch.Size(shard.shape), [])
            chunk = ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.size))
            tensors.setdefault(shard.key, whole).chunks.append(chunk)
            stored[MetadataIndex(shard.key, shard.offset)] = _StorageInfo(place.file, place.offset, place.length)
    metadata = Metadata({**tensors}, storage_data=stored, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    common = io.BytesIO()
    torch.save({}, common)
    return {
        METADATA: write_file(folder / METADATA, pickle.dumps(metadata)),
        CONFIG_FNAME: write_file(folder / CONFIG_FNAME, json.dumps(vars(CheckpointingConfig("torch_dist", 1))).encode()),
        COMMON: write_file(folder / COMMON, common.getvalue()),
    }


def read(step: Verified, model: str, state: Sharded, vocabulary: int, allowed_extra: tuple[str, ...], grid: Grid) -> None:
    """Fills the tensors of `state`, in place, from a model of a step directory. Collective; each rank reads what it needs and no more.

    Raises ConfigError, on every rank, before anything is filled: a tensor that the checkpoint lacks or has in another shape (of a padded
    vocabulary the first `vocabulary` rows count), or one that no rank asks for and whose name does not begin with `allowed_extra`.
    """
    metadata = agreed(grid, lambda: read_metadata(step, model))
    wanted = list(nested_values(load_preprocess(state)[0]))
    storages = {leaf.data.untyped_storage().data_ptr() for leaf in nested_values(state)}
    assert all(leaf.data.untyped_storage().data_ptr() in storages for leaf in wanted), "a factory of Megatron's copies its tensor"
    _refuse(step.path / model, metadata, wanted, vocabulary, allowed_extra, grid)
    agreed(grid, lambda: _fill(step.path / model, metadata, wanted))


def agreed(grid: Grid, call: Callable[[], Result]) -> Result:
    """call() on every rank. Collective: what the first rank raises is raised on all of them, as a ConfigError."""
    result, fault = None, None
    try:
        result = call()
    except OSError as error:
        fault = f"checkpoint: {error.filename}: {error.strerror}"
    except ConfigError as error:
        fault = str(error)
    except Exception as error:  # or the other ranks would wait for this one
        fault = f"checkpoint: {type(error).__name__}: {' '.join(str(error).split())}"
    faults: list[str | None] = [None] * grid.world
    dist.all_gather_object(faults, fault, group=grid.groups.control)
    for fault in faults:
        if fault is not None:
            raise ConfigError(fault)
    return cast(Result, result)


def _shard(leaf: ShardedTensor) -> Shard:
    """A leaf without its data; the axes that Megatron puts before a tensor's own (layer, expert) have size 1."""
    size = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
    return Shard(leaf.key, tuple(leaf.global_shape), tuple(leaf.global_offset), size, leaf.dtype)


def _check_cover(shards: Iterable[Shard]) -> None:
    """Shards lie on a grid: those of different offsets do not overlap."""
    found: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        found[shard.key].append(shard)
    for key, pieces in found.items():
        assert len({(piece.shape, piece.dtype) for piece in pieces}) == 1, f"{key}: ranks disagree on its shape or dtype"
        assert len({piece.offset for piece in pieces}) == len(pieces), f"{key}: written twice"
        elements = sum(math.prod(piece.size) for piece in pieces)
        assert elements == math.prod(pieces[0].shape), f"{key}: {elements} elements written of {pieces[0].shape}"


def _refuse(
    folder: Path, metadata: Metadata, wanted: list[ShardedTensor], vocabulary: int, allowed_extra: tuple[str, ...], grid: Grid
) -> None:
    stored = {key: tuple(entry.size) for key, entry in _tensors(metadata).items()}
    every: list[Any] = [None] * grid.world
    dist.all_gather_object(
        every, {leaf.key: (tuple(leaf.global_shape), leaf.allow_shape_mismatch) for leaf in wanted}, group=grid.groups.control
    )
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


@dataclass(frozen=True)
class _Copy:
    """A part of a stored chunk that belongs into a part of a tensor of this rank."""

    source: tuple[slice, ...]
    target: Tensor


@torch.no_grad()
def _fill(folder: Path, metadata: Metadata, wanted: list[ShardedTensor]) -> None:
    """Reads every stored chunk that the wanted tensors touch, once, a few files at a time."""
    reads: dict[_Place, tuple[str, list[_Copy]]] = {}
    stored = _tensors(metadata)
    chunks = {key: _Chunks(stored[key].chunks) for key in {leaf.key for leaf in wanted}}
    for leaf in wanted:
        shard, missing = _shard(leaf), leaf.data.numel()
        data = leaf.data.detach().view(shard.size)
        if leaf.allow_shape_mismatch:
            data.zero_()  # rows that pad the vocabulary here and not there
        for chunk, source, target in chunks[leaf.key].overlaps(shard):
            info = metadata.storage_data[MetadataIndex(leaf.key, chunk.offsets)]
            copies = reads.setdefault((info.relative_path, info.offset, info.length), (leaf.key, []))[1]
            copies.append(_Copy(source, data[target]))
            missing -= copies[-1].target.numel()
        if missing and not leaf.allow_shape_mismatch:
            raise ConfigError(f"checkpoint: {folder}: {missing} elements of {leaf.key} are nowhere")
    files = [list(group) for _, group in itertools.groupby(sorted(reads), key=lambda place: place[0])]
    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(lambda places: _read_file(folder, places, reads), files))


@torch.no_grad()
def _read_file(folder: Path, places: list[_Place], reads: Mapping[_Place, tuple[str, list[_Copy]]]) -> None:
    path = folder / places[0][0]
    with path.open("rb") as file:
        for place in places:
            key, copies = reads[place]
            file.seek(place[1])
            chunk = _tensor(file.read(place[2]), f"{path}: {key}")
            for copy in copies:
                copy.target.copy_(chunk[copy.source])


def _tensor(data: bytes, place: str) -> Tensor:
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(f"checkpoint: {place}: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if not isinstance(found, Tensor):
        raise ConfigError(f"checkpoint: {place} is a {type(found).__name__}, and no tensor")
    return found


class _Chunks:
    """The stored chunks of one tensor, found by the leading axes on which all of them have size 1 (layer, expert)."""

    def __init__(self, chunks: list[ChunkStorageMetadata]) -> None:
        self._lead = min(next((axis for axis, size in enumerate(chunk.sizes) if size != 1), len(chunk.sizes)) for chunk in chunks)
        self._chunks: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
        for chunk in chunks:
            self._chunks[tuple(chunk.offsets[: self._lead])].append(chunk)

    def overlaps(self, shard: Shard) -> Iterator[tuple[ChunkStorageMetadata, tuple[slice, ...], tuple[slice, ...]]]:
        """Each chunk that the shard touches, and where in the chunk and in the shard."""
        lead = [range(start, start + size) for start, size in zip(shard.offset[: self._lead], shard.size, strict=False)]
        for place in itertools.product(*lead):
            for chunk in self._chunks.get(place, ()):
                starts = [max(one, two) for one, two in zip(chunk.offsets, shard.offset, strict=True)]
                ends = [
                    min(one + many, two + more)
                    for one, many, two, more in zip(chunk.offsets, chunk.sizes, shard.offset, shard.size, strict=True)
                ]
                if all(start < end for start, end in zip(starts, ends, strict=True)):
                    yield chunk, _slices(starts, ends, chunk.offsets), _slices(starts, ends, shard.offset)


def _slices(starts: list[int], ends: list[int], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - origin, end - origin) for start, end, origin in zip(starts, ends, offset, strict=True))


def _tensors(metadata: Metadata) -> Mapping[str, TensorStorageMetadata]:
    """The tensors of a checkpoint; `read_metadata` has seen to it that there is nothing else."""
    return cast(Mapping[str, TensorStorageMetadata], metadata.state_dict_metadata)
