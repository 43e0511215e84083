"""The index of a saved model: where each shard of its tensors lies, and its hash. megarl reads it instead of torch's `.metadata`, a pickle.

Axes that Megatron puts before a parameter's own (layer, expert) have size 1 in every shard.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError

from megarl.checkpoints.steps import SavedStep
from megarl.errors import ConfigError
from megarl.imports import gc_paused
from megarl.text.display import one_line

INDEX = "shards.json"
_LIMIT_BYTES = 1 << 30
_LINE = 250  # most characters of an error message, which may quote the file
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Natural = Annotated[int, Field(ge=0)]
Extents = Annotated[tuple[Natural, ...], Field(max_length=64)]


class Location(NamedTuple):
    """Where a saved tensor lies."""

    file: str  # name inside the model's folder
    offset: Natural  # bytes
    length: Natural
    xxh128: str  # hash of these bytes; "" if another program wrote them and there is none


@dataclass(frozen=True)
class Shard:
    """A piece of a tensor."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]
    dtype: torch.dtype


class StoredShard(NamedTuple):
    """A shard of a tensor in a checkpoint."""

    offset: Extents
    size: Extents
    location: Location


class _Tensor(NamedTuple):
    dtype: str
    shape: Extents
    shards: Annotated[list[StoredShard], Field(min_length=1)]


_INDEX = TypeAdapter(dict[str, _Tensor])


class StoredTensor:
    """A tensor of a checkpoint. Its shards can be found by the leading axes on which all of them have size 1 (layer, expert)."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], shards: list[StoredShard]) -> None:
        self.dtype, self.shape, self.shards = dtype, shape, shards
        self._lead = min(next((axis for axis, size in enumerate(shard.size) if size != 1), len(shard.size)) for shard in shards)
        self._by_lead: dict[tuple[int, ...], list[StoredShard]] = defaultdict(list)
        for shard in shards:
            self._by_lead[shard.offset[: self._lead]].append(shard)

    def overlaps(self, wanted: Shard) -> Iterator[tuple[StoredShard, tuple[slice, ...], tuple[slice, ...]]]:
        """Yield each stored shard that overlaps the wanted one, with the overlap as slices of the stored and of the wanted one."""
        lead = [range(start, start + size) for start, size in zip(wanted.offset[: self._lead], wanted.size, strict=False)]
        for index in itertools.product(*lead):
            for shard in self._by_lead.get(index, ()):
                starts = [max(one, two) for one, two in zip(shard.offset, wanted.offset, strict=True)]
                ends = [
                    min(one + many, two + more)
                    for one, many, two, more in zip(shard.offset, shard.size, wanted.offset, wanted.size, strict=True)
                ]
                if all(start < end for start, end in zip(starts, ends, strict=True)):
                    yield shard, _slices(starts, ends, shard.offset), _slices(starts, ends, wanted.offset)


def check_cover(shards: Iterable[Shard]) -> None:
    """Raise ValueError unless every element of every tensor lies in exactly one of the shards.

    Shards with different offsets are taken not to overlap: they lie on a grid.
    """
    by_key: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_key[shard.key].append(shard)
    for key, pieces in by_key.items():
        if len({(piece.shape, piece.dtype) for piece in pieces}) > 1:
            raise ValueError(f"{key}: its pieces disagree on its shape or dtype")
        if len({piece.offset for piece in pieces}) != len(pieces):
            raise ValueError(f"{key}: a piece of it is there twice")
        elements, whole = sum(math.prod(piece.size) for piece in pieces), math.prod(pieces[0].shape)
        if elements != whole:
            raise ValueError(f"{key}: {elements} elements of {whole} in shape {list(pieces[0].shape)}")


@gc_paused()  # garbage collection would stall, for seconds, the training step that runs alongside
def encode_index(shards: Iterable[tuple[Shard, Location]]) -> bytes:
    """Return the contents of the file INDEX."""
    tensors: dict[str, _Tensor] = {}
    for shard, location in shards:
        if shard.key not in tensors:
            tensors[shard.key] = _Tensor(_NAMES[shard.dtype], shard.shape, [])
        tensors[shard.key].shards.append(StoredShard(shard.offset, shard.size, location))
    return _INDEX.dump_json(tensors)


@gc_paused()
def read_index(step: SavedStep, model: str) -> dict[str, StoredTensor]:
    """Read the index of a model's tensors, by their names.

    Each shard is checked to lie within its tensor, once, and in a file of the checkpoint, within that file's size.

    Raises:
        ConfigError: the file is not what megarl writes.
    """
    name = f"{model}/{INDEX}"
    record = step.manifest.files.get(name)
    if record is not None and record.size > _LIMIT_BYTES:
        raise ConfigError(f"checkpoint: {step.path / name} has {record.size} bytes, more than {_LIMIT_BYTES}")
    sizes = {path.removeprefix(f"{model}/"): file.size for path, file in step.manifest.files.items() if path.startswith(f"{model}/")}
    try:
        given = _INDEX.validate_json(step.read(name), strict=True)
        return {key: _checked(key, tensor, sizes) for key, tensor in given.items()}
    except ValidationError as error:
        fault = error.errors()[0]
        reason = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']} (got {fault['input']!r:.80})"
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error)
    raise ConfigError(f"checkpoint: {step.path / name}: {one_line(reason, _LINE)}")


def _checked(key: str, tensor: _Tensor, sizes: Mapping[str, int]) -> StoredTensor:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{key!r} has the unknown dtype {tensor.dtype!r}")
    for shard in tensor.shards:
        if not len(shard.offset) == len(shard.size) == len(tensor.shape) or any(
            start + many > whole for start, many, whole in zip(shard.offset, shard.size, tensor.shape, strict=True)
        ):
            raise ValueError(f"a shard of {key!r} lies outside its shape {list(tensor.shape)}")
        file = shard.location.file
        if file not in sizes:
            raise ValueError(f"{key!r} lies in {file!r}, which is no file of the checkpoint")
        if shard.location.offset + shard.location.length > sizes[file]:
            raise ValueError(f"{key!r} lies behind the end of {file!r}")
        if not shard.location.xxh128:
            raise ValueError(f"{key!r} has no hash")
    if len({shard.offset for shard in tensor.shards}) < len(tensor.shards):
        raise ValueError(f"{key!r} has two shards in one place")
    return StoredTensor(_DTYPES[tensor.dtype], tensor.shape, tensor.shards)


def _slices(starts: list[int], ends: list[int], offset: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(start - origin, end - origin) for start, end, origin in zip(starts, ends, offset, strict=True))
