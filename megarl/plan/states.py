"""The bytes of weights, gradients and optimizer on a rank, as Megatron's distributed optimizer holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config import Layout, OptimizerSettings
from megarl.plan.parameters import ChunkParameters, SizeCounts, buffer_elements, count, replicas

ITEM = {"float32": 4, "bfloat16": 2}  # bytes
MOMENT = 4  # bytes per element of a moment, in float32: Adam has two, and Muon one


@dataclass(frozen=True)
class States:
    """Bytes of one model on one rank."""

    weights: int
    gradients: int = 0  # in float32, on every copy
    optimizer: int = 0  # this rank's share of the moments, and for bfloat16 weights of their float32 copies
    host: int = 0  # of an offloaded optimizer, in host memory

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: States) -> States:
        return States(
            self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer, self.host + other.host
        )


def states(chunks: Sequence[ChunkParameters], layout: Layout, dtype: str, optimizer: OptimizerSettings | None) -> States:
    """Return what a rank holds of a model.

    Args:
        chunks: the rank's parameters.
        layout: the layout of the model's ranks.
        dtype: the dtype of the weights.
        optimizer: the settings of its optimizer; None: it is frozen. Beside moments in host memory there are pinned copies of the main
            weights and the gradients.
    """
    return sum((_chunk(chunk, layout, ITEM[dtype], optimizer) for chunk in chunks), States(0))


def _chunk(chunk: ChunkParameters, layout: Layout, item: int, optimizer: OptimizerSettings | None) -> States:
    buffers = 4 * chunk.buffers
    if optimizer is None:
        return States(chunk.elements * item + buffers)
    lengths = [buffer_elements(sizes, copies) for sizes, copies in zip((chunk.dense, chunk.experts), replicas(layout), strict=True)]
    each = [length // copies for length, copies in zip(lengths, replicas(layout), strict=True)]
    shares = sum(each)
    # Of Muon's matrices the rank may have few: the slice of one rank is all embedding.
    others = [count(chunk.dense) - chunk.dense_matrices, count(chunk.experts) - chunk.expert_matrices]
    second = sum(map(min, each, others)) if optimizer.muon is not None else shares
    moments, away = (shares + second) * MOMENT, round(shares * optimizer.offloaded)
    copies = round(away * 2 * _pinned(chunk.dense + chunk.experts))
    main = shares * 4 if item < 4 else 0
    return States(
        (sum(lengths) + chunk.frozen) * item + buffers, sum(lengths) * 4, moments - away * 2 * MOMENT + main, away * 2 * MOMENT + copies
    )


def _pinned(parameters: SizeCounts) -> float:
    """Bytes per element of pinned float32 copies of these parameters: torch rounds the memory of each up to a power of two
    (CachingHostAllocatorImpl::allocate)."""
    memory = sum((1 << (4 * size - 1).bit_length()) * times for size, times in parameters)
    return memory / max(1, count(parameters))
