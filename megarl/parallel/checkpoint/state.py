"""The content of a distributed checkpoint for one model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.checkpoints.files import Content
from megarl.models.description import ModelDescription
from megarl.parallel.optimizer import Trainable

RANDOM = "random"  # folder of the random states


@dataclass(frozen=True)
class ModelState:
    """One model to be saved or loaded: this rank's chunks, and the optimizer if it is saved or loaded with them."""

    chunks: Sequence[Any]  # from parallel/build.py, in data-parallel wrappers or not
    description: ModelDescription
    trainable: Trainable | None = None
    described: Mapping[str, Content] = field(default_factory=dict)  # files saved beside the weights (rank 0's): see `hf.described`
    lora: Mapping[str, Any] | None = None  # of adapters, which are then all that is saved: rank, alpha, targets, the base's fingerprint
    wake: Callable[[], object] = lambda: None  # brings the tensors onto the device, which may evict those of other models
