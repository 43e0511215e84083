"""The index of a checkpoint that another program wrote with Megatron's torch_dist format: its `.metadata`, read without executing anything.

The file is torch's pickle of the dataclasses in torch/distributed/checkpoint/metadata.py: for every tensor its dtype, shape and chunks, and
for every chunk its file and place there. Other entries are pickled objects (`_extra_state`, random states), whose names alone are read.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.errors import ConfigError
from megarl.parallel.checkpoint.dcp import FORMAT, METADATA
from megarl.parallel.checkpoint.index import Location, StoredShard, StoredTensor
from megarl.parallel.checkpoint.plain_pickle import Built, Named, read_pickle
from megarl.text.display import one_line
from megarl.text.strict_json import read_json

BACKEND = "torch_dist"
UNKNOWN = ""  # hash of what another program wrote
_LIMIT_BYTES = 4 << 30
_FORMAT_BYTES = 1 << 20
_MAX_AXES = 64
_DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)
} | {str(dtype): dtype for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}
_TORCH, _FILES = "torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem."
_PLAN = "torch.distributed.checkpoint.planner."
_MCORE = "megatron.core.dist_checkpointing.strategies.torch."
_TENSOR, _BYTES = _TORCH + "TensorStorageMetadata", _TORCH + "BytesStorageMetadata"
_ALLOWED = {
    *_DTYPES,
    *("torch.Size", "torch.serialization._get_layout"),
    *(_TORCH + name for name in ("Metadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    *(_TENSOR, _BYTES, _TORCH + "_MEM_FORMAT_ENCODING", _FILES + "_StorageInfo"),
    *(_PLAN + name for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),  # kept by Megatron-core, not needed here
    *(_MCORE + "MCoreMetadata", _MCORE + "MCoreSavePlan"),  # of older versions
    *("pathlib.PosixPath", "pathlib.Path", "pathlib._local.PosixPath"),
}
_FILE = re.compile(r"[^/\0]+\.distcp")


@dataclass(frozen=True)
class DcpIndex:
    """What a checkpoint holds."""

    tensors: Mapping[str, StoredTensor]
    objects: tuple[str, ...]  # names of pickled objects, which are never read


def read_dcp_index(folder: Path) -> DcpIndex:
    """Read which tensors a folder in torch_dist format holds, and where they lie.

    Every chunk is checked to lie within its tensor, and within a `.distcp` file of the folder, apart from all others.

    Raises:
        ConfigError: one line: the folder is in another format, or its metadata name what no checkpoint has, are broken or do not fit the
            files.
    """
    _check_format(folder)
    file = folder / METADATA
    try:
        size = file.stat().st_size
        if size > _LIMIT_BYTES:
            raise ValueError(f"has {size} bytes, more than {_LIMIT_BYTES}")
        return _index(read_pickle(file.read_bytes(), _ALLOWED), folder)
    except OSError as error:
        raise ConfigError(f"checkpoint: {error.filename or file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"checkpoint: {file} {one_line(str(error))}") from None


def _check_format(folder: Path) -> None:
    file = folder / FORMAT
    try:
        backend = read_json(file, _FORMAT_BYTES)["sharded_backend"]
    except OSError as error:
        raise ConfigError(f"checkpoint: {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"checkpoint: {file} does not say which format it is: {type(error).__name__}: {one_line(str(error))}") from None
    if backend != BACKEND:
        raise ConfigError(f"checkpoint: {folder} is in Megatron's format {one_line(str(backend), 100)!r}, and only {BACKEND!r} is read")


def _index(metadata: Any, folder: Path) -> DcpIndex:
    fields = _state(metadata, _TORCH + "Metadata")
    entries, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if type(entries) is not dict or type(stored) is not dict or not all(type(key) is str for key in entries):
        raise ValueError("lists no tensors")
    places = _places(stored, {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()})
    tensors: dict[str, StoredTensor] = {}
    objects = list[str]()
    for key, entry in entries.items():
        if type(entry) is Built and entry.name == _BYTES:
            objects.append(key)
            places[key].pop(None, None)
        else:
            tensors[key] = _tensor(key, _state(entry, _TENSOR), places[key])
    left = [key for key, rest in places.items() if rest]
    if left:
        raise ValueError(f"says where {left[0]!r} lies, which is not all in its list of tensors ({len(left)} such names)")
    return DcpIndex(tensors, tuple(objects))


def _places(stored: Mapping[Any, Any], sizes: Mapping[str, int]) -> defaultdict[str, dict[tuple[int, ...] | None, Location]]:
    """Return the place of every chunk, by name and offset; of an object's by None."""
    places: defaultdict[str, dict[tuple[int, ...] | None, Location]] = defaultdict(dict)
    by_file: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, info in stored.items():
        name, given = _state(index, _TORCH + "MetadataIndex"), _state(info, _FILES + "_StorageInfo")
        key, offset = name.get("fqn"), None if name.get("offset") is None else _extents(name["offset"])
        file: Any = given.get("relative_path")
        start: Any = given.get("offset")
        length: Any = given.get("length")
        if type(key) is not str or type(file) is not str or not _natural(start) or not _natural(length):
            raise ValueError(f"has a broken place of {one_line(str(key), 100)!r}")
        if given.get("transform_descriptors"):
            raise ValueError(f"says that {key!r} is compressed or encrypted, which is not read")
        if not _FILE.fullmatch(file) or file not in sizes:
            raise ValueError(f"puts {key!r} into {one_line(file, 100)!r}, which is not a .distcp file of the folder")
        if start + length > sizes[file]:
            raise ValueError(f"puts {key!r} at bytes {start} to {start + length} of {file}, which has {sizes[file]}")
        if offset in places[key]:
            raise ValueError(f"puts a chunk of {key!r} in two places")
        places[key][offset] = Location(file, start, length, UNKNOWN)
        by_file[file].append((start, start + length))
    for file, ranges in by_file.items():
        ranges.sort()
        for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False):
            if start < end:
                raise ValueError(f"puts two chunks into the same bytes of {file}: one ends at {end}, the next begins at {start}")
    return places


def _tensor(key: str, fields: Mapping[str, Any], places: dict[tuple[int, ...] | None, Location]) -> StoredTensor:
    """Return a tensor; takes its chunks' places from `places`."""
    properties, shape, chunks = fields.get("properties"), _extents(fields.get("size")), fields.get("chunks")
    dtype = _dtype(key, properties)
    if type(chunks) is not list or len(chunks) != len(places):
        raise ValueError(f"has {len(chunks) if type(chunks) is list else 'no'} chunks of {key!r}, and {len(places)} places")
    shards = []
    for chunk in chunks:
        given = _state(chunk, _TORCH + "ChunkStorageMetadata")
        offset, size = _extents(given.get("offsets")), _extents(given.get("sizes"))
        if not len(offset) == len(size) == len(shape) or any(a + b > c for a, b, c in zip(offset, size, shape, strict=True)):
            raise ValueError(f"has a chunk of {key!r} outside its shape {list(shape)}")
        if offset not in places:
            raise ValueError(f"does not say where the chunk of {key!r} at {list(offset)} lies")
        if (place := places.pop(offset)).length < math.prod(size) * dtype.itemsize:
            raise ValueError(f"gives {key!r} {list(size)} of {dtype} only {place.length} bytes")
        shards.append(StoredShard(offset, size, place))
    if not shards:
        raise ValueError(f"has no chunks of {key!r}")
    return StoredTensor(dtype, shape, shards)


def _dtype(key: str, properties: Any) -> torch.dtype:
    state = properties.state if type(properties) is Built and properties.name == _TORCH + "TensorProperties" else None
    named = state[0] if type(state) is tuple and state else None
    if type(named) is not Named or named.name not in _DTYPES:
        raise ValueError(f"has no dtype of {key!r}")
    return _DTYPES[named.name]


def _state(built: Any, name: str) -> dict[str, Any]:
    """Return the fields of an object of a dataclass."""
    if type(built) is not Built or built.name != name or built.args or type(built.state) not in (dict, type(None)):
        raise ValueError(f"has something else where a {name.rpartition('.')[2]} is expected")
    return built.state or {}


def _extents(built: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    given = built.args[0] if type(built) is Built and built.name == "torch.Size" and len(built.args) == 1 else None
    if type(given) is not tuple or len(given) > _MAX_AXES or not all(map(_natural, given)):
        raise ValueError("has something else where a torch.Size is expected")
    return given


def _natural(number: Any) -> bool:
    return type(number) is int and number >= 0
