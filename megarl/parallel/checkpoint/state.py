"""What a distributed checkpoint holds of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.parallel.optimizer import Trainable

RANDOM = "random"  # folder of the random states
IDENTITY = ("model_type", "vocab_size")  # of config.json; everything else shows in the shapes


@dataclass(frozen=True)
class ModelState:
    """One model as it is saved or loaded: this rank's chunks, and the optimizer if that is saved or loaded with them."""

    chunks: Sequence[Any]  # of parallel/build.py, in data-parallel wrappers or not
    hf: Mapping[str, Any]  # config.json
    trainable: Trainable | None = None
    described: Mapping[str, bytes] = field(default_factory=dict)  # what is saved beside the weights (rank 0's): see `hf.described`
    wake: Callable[[], object] = lambda: None  # brings the tensors onto the device, from which those of other models may go
