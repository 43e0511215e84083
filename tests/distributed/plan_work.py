"""What the ranks of the pool hold, in bytes, for the plan to be compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.batch import Batch, Sample, pack
from megarl.config import ModelSettings, OptimizerSettings
from megarl.parallel import schedule
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy
from megarl.parallel.optimizer import Trainable, make_trainable

SEEN = Counter()

class Saved:
    """The storages that autograd keeps, each once: how many bytes at a time, at most."""

    def __init__(self, known: set[int]) -> None:
        self._known, self._held, self._now, self.peak = known, Counter[int](), 0, 0
        self.log = Counter()
        self.at_peak = None
        self.shapes = {}

    def pack(self, tensor: Tensor) -> _Kept | Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.data_ptr() in self._known or not storage.nbytes():
            return tensor
        if not self._held[key]:
            self._now += storage.nbytes()
            self.shapes[key] = (tuple(tensor.shape), str(tensor.dtype), storage.nbytes())
        self._held[key] += 1
        if self._now > self.peak:
            self.peak = self._now
            self.at_peak = Counter(self.shapes[k] for k, n in self._held.items() if n)
        return _Kept(self, tensor, key)

    def drop(self, key: int, size: int) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            self._now -= size


class _Kept:
    def __init__(self, saved: Saved, tensor: Tensor, key: int) -> None:
        self.saved, self.tensor, self.key, self.size = saved, tensor, key, tensor.untyped_storage().nbytes()

    def __del__(self) -> None:
        self.saved.drop(self.key, self.size)


def measure(grid: Grid, hf: dict[str, Any], settings: ModelSettings, tokens: int, sequences: int, micro: int):
    torch.manual_seed(0)
    chunks = build_chunks(transformer_config(hf, settings, grid.layout, choose()), hf, choose(), grad=True)
    for chunk in chunks:
        for p in chunk.parameters():
            p.data.normal_(std=0.02)
    policy = make_trainable(chunks, OptimizerSettings(lr=1e-3), total_steps=10)
    rng = np.random.default_rng(grid.dp_rank)
    def batch():
        return pack([Sample(rng.integers(0, 100, tokens // sequences + 1).astype(np.int32), 1, np.zeros(tokens // sequences, np.float32), "stop") for _ in range(sequences)])
    mine = [batch() for _ in range(micro)]

    def loss_fn(logits_RV, row_T, batch):
        lp_T, e = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, grid.groups.tp, hf["vocab_size"], overwrite=True)
        return lp_T.sum() / 1000, None

    known = {p.untyped_storage().data_ptr() for c in policy.chunks for p in [*c.module.parameters(), *c.module.buffers()]}
    saved = Saved(known)
    policy.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda k: k.tensor if isinstance(k, _Kept) else k):
        schedule.run(policy.chunks, mine, loss_fn, grid, forward_only=False)
    policy.step()
    return saved.peak, saved.at_peak
