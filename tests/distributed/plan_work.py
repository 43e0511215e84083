"""What the ranks of the pool hold of a model in training, in bytes, for the plan to be compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megarl.batch import Batch, Sample, pack
from megarl.config import ModelSettings, Mtp, MuonSettings, OptimizerSettings
from megarl.models.description import ModelDescription
from megarl.parallel import schedule
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy
from megarl.parallel.muon import matrices_of
from megarl.parallel.optimizer import Trainable, make_trainable
from megarl.parallel.predictor import PredictorPass

LENGTH, SEQUENCES = 64, 2  # of a micro-batch


@dataclass(frozen=True)
class Case:
    """A model in training."""

    family: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    micro_batches: int = 1
    mtp: Mtp = "drop"
    muon: bool = False

    @property
    def settings(self) -> ModelSettings:
        return ModelSettings(path=Path(self.family), dtype=self.dtype, recompute=self.recompute)

    @property
    def optimizer(self) -> OptimizerSettings:
        return OptimizerSettings(lr=1e-3, muon=MuonSettings() if self.muon else None)


class Saved:
    """The storages that autograd keeps, each once and without those in `known`: how many bytes at a time, at most."""

    def __init__(self, known: set[int]) -> None:
        self._known, self._uses, self._bytes, self.peak = known, Counter[int](), 0, 0

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        storage = tensor.untyped_storage()
        return tensor if storage.data_ptr() in self._known else _Kept(self, tensor)

    def count(self, tensor: Tensor, by: int) -> None:
        """One use of the tensor's storage more, or less."""
        storage = tensor.untyped_storage()
        before = self._uses[storage._cdata] > 0
        self._uses[storage._cdata] += by
        self._bytes += storage.nbytes() * ((self._uses[storage._cdata] > 0) - before)
        self.peak = max(self.peak, self._bytes)


class _Kept:
    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self._saved, self.tensor = saved, tensor
        saved.count(tensor, 1)

    def __del__(self) -> None:
        self._saved.count(self.tensor, -1)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


def measure(grid: Grid, models: dict[str, ModelDescription], cases: Sequence[Case]) -> list[dict[str, int]]:
    """Of each case what this rank holds, after an update: weights, gradients, optimizer; and of activations what it held at most."""
    return [_measure(grid, replace(models[case.family], mtp=case.mtp), case) for case in cases]


def _measure(grid: Grid, model: ModelDescription, case: Case) -> dict[str, int]:
    torch.manual_seed(0)
    chunks = build_chunks(transformer_config(model, case.settings, grid.layout, choose()), model, choose(), grad=True)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.data.normal_(std=0.02)
    policy = make_trainable(chunks, case.optimizer, 10, matrices_of(chunks, model, grid, case.optimizer.muon))
    weights = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    known = {tensor.untyped_storage().data_ptr() for tensor in weights}
    predictor = PredictorPass(policy.chunks, grid, model.vocab, 0.1) if model.predicts else None
    peak = _update(grid, policy, known, [_micro_batch(grid) for _ in range(case.micro_batches)], model.vocab, predictor)
    optimizer = [tensor for tensor in policy.state() if tensor.untyped_storage().data_ptr() not in known]
    sizes = {"weights": weights, "gradients": policy.gradients(), "optimizer": optimizer}
    return {name: _bytes(tensors) for name, tensors in sizes.items()} | {"activations": peak}


def _update(grid: Grid, policy: Trainable, known: set[int], batches: list[Batch], vocabulary: int, predictor: PredictorPass | None) -> int:
    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, None]:
        lp_T, _ = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, grid.groups.tp, vocabulary, overwrite=True)
        return lp_T.sum(), None

    saved = Saved(known)
    policy.zero_grad()
    with saved_tensors_hooks(saved.pack, _unpack):
        schedule.run(policy.chunks, batches, loss_fn, grid, forward_only=False, predictor=predictor)
    assert not policy.step().skipped
    return saved.peak


def _micro_batch(grid: Grid) -> Batch:
    rng = np.random.default_rng(grid.dp_rank)
    tokens = rng.integers(0, 100, (SEQUENCES, LENGTH + 1)).astype(np.int32)
    batch = pack([Sample(own, 1, np.zeros(LENGTH, np.float32), "stop") for own in tokens])
    return batch.with_extra(weight=torch.ones(len(batch)))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}.values())
