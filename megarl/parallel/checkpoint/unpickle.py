"""Reads the one pickle of a checkpoint, torch's `.metadata`, without trusting it: plain data of nine known classes, or nothing.

torch reads it with pickle.load (torch/distributed/checkpoint/filesystem.py:930), which runs whatever the file says, and unpickles objects
inside the shards in the same way (default_planner.py:390). megarl writes no objects, and reads no file in which there are any.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megarl.checkpoints.steps import Verified
from megarl.config import ConfigError

METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint"
ALLOWED = {
    *((f"{_TORCH}.metadata", name) for name in ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "StorageMeta")),
    *((f"{_TORCH}.metadata", name) for name in ("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    (f"{_TORCH}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch", "float16"),
    ("torch.serialization", "_get_layout"),  # looks the name of a layout up in a table
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, place: str) -> None:
        super().__init__(io.BytesIO(data))
        self._place = place

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ConfigError(f"checkpoint: {self._place} asks for {module}.{name}, which no checkpoint of megarl holds: not loaded")
        return super().find_class(module, name)

    def persistent_load(self, identifier: Any) -> NoReturn:
        raise ConfigError(f"checkpoint: {self._place} refers to an object outside: not loaded")


def read_metadata(step: Verified, model: str) -> Metadata:
    """What torch_dist says of a model's tensors. Raises ConfigError where the file is not what megarl writes."""
    place = f"{step.path / model / METADATA}"
    data = step.read(f"{model}/{METADATA}")
    try:
        metadata = _Unpickler(data, place).load()
    except ConfigError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise ConfigError(f"checkpoint: {place} is damaged: {type(error).__name__}: {' '.join(str(error).split())}") from None
    if not isinstance(metadata, Metadata) or not all(
        isinstance(entry, TensorStorageMetadata) for entry in metadata.state_dict_metadata.values()
    ):
        raise ConfigError(f"checkpoint: {place} does not describe tensors alone: not loaded")
    for index, info in metadata.storage_data.items():
        if f"{model}/{info.relative_path}" not in step.manifest.files or info.transform_descriptors:
            raise ConfigError(f"checkpoint: {place} puts {index.fqn} into {info.relative_path!r}, which is no file of the checkpoint")
    return metadata
