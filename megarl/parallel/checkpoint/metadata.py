"""Reads torch's `.metadata`, which says where the tensors of a checkpoint lie, without trusting it.

It is a pickle, which torch unpickles (torch/distributed/checkpoint/filesystem.py:930), as it does the objects inside the shards
(default_planner.py:390). Here it is read as plain data, and torch's dataclasses are built from validated fields. megarl writes no objects,
and refuses a file that contains any.
"""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.checkpoints.files import FileRecord
from megarl.checkpoints.steps import SavedStep
from megarl.config import ConfigError
from megarl.imports import uncollected
from megarl.parallel.checkpoint.plain_pickle import LIMIT_BYTES, GlobalName, PickledObject, read_plain
from megarl.text import one_line

METADATA = ".metadata"
HASHES = "hashes.json"
AXES = 64  # the most that a tensor can have
LINE = 250  # most characters of an error message, which may quote the file
_CLASSES = "torch.distributed.checkpoint.metadata."
_STORAGE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_LAYOUT = "torch.serialization._get_layout"
_DTYPES = {f"torch.{name}": getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
_NAMES = {
    *(_CLASSES + name for name in ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "StorageMeta")),
    *(_CLASSES + name for name in ("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *("torch.Size", _STORAGE, _LAYOUT),
    *_DTYPES,
}


def read_metadata(step: SavedStep, model: str) -> Metadata:
    """Read what torch_dist says about a model's tensors, without its writer's plans and notes.

    Each chunk is checked to lie within its tensor, and to be stored once, in a file of the checkpoint, within that file's size.

    Raises:
        ConfigError: the file is not what megarl writes.
    """
    name = f"{model}/{METADATA}"
    record = step.manifest.files.get(name)
    try:
        if record is not None and record.size > LIMIT_BYTES:
            raise ValueError(f"has {record.size} bytes, more than {LIMIT_BYTES}")
        files = {path.removeprefix(f"{model}/"): file for path, file in step.manifest.files.items() if path.startswith(f"{model}/")}
        data = step.read(name)
        with uncollected():
            return _metadata(read_plain(data, _NAMES), files)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"checkpoint: {step.path / name} {one_line(str(error), LINE)}") from None


def read_hashes(step: SavedStep, model: str, metadata: Metadata) -> dict[str, dict[str, str]]:
    """Read the hashes of a model's chunks: by file, and by the chunk's offset in it. Raises ConfigError if one is missing or malformed."""
    name = f"{model}/{HASHES}"
    try:
        given = json.loads(step.read(name))
        for info in metadata.storage_data.values():
            if not isinstance(given[info.relative_path][str(info.offset)], str):
                raise TypeError(f"{info.relative_path}, byte {info.offset}: no text")
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"checkpoint: {step.path / name}: {type(error).__name__}: {one_line(str(error), LINE)}") from None
    return cast(dict[str, dict[str, str]], given)


def _metadata(value: Any, files: dict[str, FileRecord]) -> Metadata:
    fields = _fields(value, "Metadata", {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"})
    described, stored = (_expect(dict, fields.get(name), name) for name in ("state_dict_metadata", "storage_data"))
    found: dict[MetadataIndex, _StorageInfo] = {}
    for key, place in stored.items():
        index, info = _index(key), _place(place)
        file = files.get(info.relative_path)
        if file is None:
            raise ValueError(f"puts {index.fqn!r} into {info.relative_path!r}, which is no file of the checkpoint")
        if info.offset + info.length > file.size:
            raise ValueError(f"puts {index.fqn!r} behind the end of {info.relative_path!r}")
        found[index] = info
    chunks = sum(len(_expect(list, _tensor_fields(entry)["chunks"], "chunks")) for entry in described.values())
    if not chunks == len(found) == len(stored):
        raise ValueError(f"describes {chunks} chunks, and says of {len(found)} where they are")
    tensors = {_expect(str, key, "a tensor's name"): _tensor(key, entry, found) for key, entry in described.items()}
    return Metadata({**tensors}, storage_data=found)


def _tensor_fields(value: Any) -> dict[str, Any]:
    fields = _fields(value, "TensorStorageMetadata", {"properties", "size", "chunks"})
    return {"properties": None, "size": None, "chunks": None, **fields}


def _tensor(key: str, value: Any, stored: dict[MetadataIndex, _StorageInfo]) -> TensorStorageMetadata:
    fields = _tensor_fields(value)
    size = _size(fields["size"])
    chunks = [_chunk(chunk) for chunk in fields["chunks"]]
    if not chunks:
        raise ValueError(f"describes {key!r} without a chunk")
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(
            start + many > whole for start, many, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise ValueError(f"puts a chunk of {key!r} outside its shape {list(size)}")
        if MetadataIndex(key, chunk.offsets) not in stored:
            raise ValueError(f"does not say where the chunk of {key!r} at {list(chunk.offsets)} is")
    return TensorStorageMetadata(_properties(fields["properties"]), size, chunks)


def _chunk(value: Any) -> ChunkStorageMetadata:
    fields = _fields(value, "ChunkStorageMetadata", {"offsets", "sizes"})
    return ChunkStorageMetadata(_size(fields.get("offsets")), _size(fields.get("sizes")))


def _properties(value: Any) -> TensorProperties:
    """The tensor properties, which torch pickles as a tuple. Only the dtype is used; the others are checked and dropped."""
    if (
        type(value) is not PickledObject
        or value.name != _CLASSES + "TensorProperties"
        or type(value.state) is not tuple
        or len(value.state) != 5
    ):
        raise ValueError("has malformed tensor properties")
    dtype, layout, gradient, order, pinned = value.state
    if type(dtype) is not GlobalName or dtype not in _DTYPES:
        raise ValueError("has an unknown dtype")
    if _called(layout, _LAYOUT) != ("torch.strided",) or _called(order, _CLASSES + "_MEM_FORMAT_ENCODING") != (0,):
        raise ValueError("has a tensor that is not strided and contiguous")
    _expect(bool, gradient, "requires_grad")
    _expect(bool, pinned, "pin_memory")
    return TensorProperties(dtype=_DTYPES[dtype])


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex", {"fqn", "offset", "index"})
    return MetadataIndex(_expect(str, fields.get("fqn"), "fqn"), _size(fields.get("offset")))


def _place(value: Any) -> _StorageInfo:
    fields = _fields(value, "_StorageInfo", {"relative_path", "offset", "length"}, _STORAGE)
    offset, length = (_natural(fields.get(name), name) for name in ("offset", "length"))
    return _StorageInfo(_expect(str, fields.get("relative_path"), "relative_path"), offset, length)


def _size(value: Any) -> torch.Size:
    given = _called(value, "torch.Size")
    if len(given) != 1 or type(given[0]) is not tuple or len(given[0]) > AXES:
        raise ValueError("has a malformed size")
    return torch.Size([_natural(extent, "a size") for extent in given[0]])


def _called(value: Any, name: str) -> tuple[Any, ...]:
    """The arguments with which a function is called."""
    if type(value) is not PickledObject or value.name != name or value.state is not None:
        raise ValueError(f"lacks a {name}")
    return value.arguments


def _fields(value: Any, kind: str, known: set[str], name: str | None = None) -> dict[str, Any]:
    """The fields of a dataclass."""
    if type(value) is not PickledObject or value.name != (name or _CLASSES + kind) or value.arguments or type(value.state) is not dict:
        raise ValueError(f"lacks a {kind} where there should be one")
    if unknown := [field for field in value.state if type(field) is not str or field not in known]:
        raise ValueError(f"sets {unknown[0]!r} of a {kind}" if type(unknown[0]) is str else f"sets no field of a {kind}")
    return value.state


def _expect(kind: type, value: Any, what: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"has a {type(value).__name__} as {what}, not a {kind.__name__}")
    return value


def _natural(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"has {value if type(value) is int else 'a ' + type(value).__name__} as {what}")
    return value
