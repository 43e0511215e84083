"""The multi-token prediction layers of a Hugging Face directory, kept as they are stored beside a model that does not have them.

Of quantised matrices the values are kept, in bfloat16, as those of the model are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megarl.models.hf import Checkpoint, TensorInfo, inventory, scales_of_activations

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.checkpoints.files import HashedFile

KEPT = "mtp.safetensors"  # beside config.json in a step directory
_ALIGNED = 8  # bytes; alignment of the start of safetensors' data


@dataclass(frozen=True)
class Predictors:
    """The tensors of a directory whose names begin with one of `prefixes`: the content of a safetensors file."""

    path: Path
    prefixes: tuple[str, ...]

    def held(self) -> dict[str, TensorInfo]:
        """Return them by name. Raises ConfigError as `inventory` does."""
        tensors = inventory(self.path)
        unused = scales_of_activations(tensors)
        return {name: info for name, info in tensors.items() if name.startswith(self.prefixes) and name not in unused}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each with its name, in the order of `held`."""
        names = self.held()
        with Checkpoint(self.path) as checkpoint:
            for name in names:
                yield name, checkpoint.read(name)

    def write(self, file: HashedFile | BinaryIO) -> None:
        """Write the file, one tensor in memory at a time."""
        import torch

        entries, at = {}, 0
        for name, info in self.held().items():
            size = TensorInfo(info.shape, info.read_dtype, info.file, 0).size
            entries[name] = {"dtype": info.read_dtype, "shape": list(info.shape), "data_offsets": [at, at + size]}
            at += size
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNED)
        file.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in self.tensors():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
