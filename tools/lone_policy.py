"""A policy on one rank in its own process, without Ray, and batches for it, for benchmarks of the update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.batch import Batch
from megarl.config import Layout, ModelSettings, OptimizerSettings
from megarl.parallel import backend
from megarl.sync.store import listen_store


def lone_policy(path: Path, optimizer: OptimizerSettings) -> tuple[Any, Callable[..., Tensor], Callable[..., Any]]:
    """Build a float32 policy on CPU in this process, which must not have imported Megatron-core yet.

    Args:
        path: its Hugging Face directory.
        optimizer: the optimizer's settings.

    Returns:
        The `Model`; a function that computes the log-probs of the targets from its output; their negative mean as a loss of `Model.step`.
    """
    hardware, layout = backend.choose(gpus=False), Layout()
    from megarl.parallel.grid import init_grid
    from megarl.parallel.logprobs import logprob_entropy
    from megarl.ranks.model import Model

    grid = init_grid(layout, rank=0, store=listen_store("127.0.0.1", 1, 60.0)[0], seed=1, timeout_s=60.0)
    policy = Model(path, ModelSettings(path=path, dtype="float32"), layout, hardware, grid, optimizer=optimizer, updates=10**6)
    vocabulary = policy.description.vocab

    def logp(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> Tensor:
        return logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, grid.groups.tp, vocabulary)[0]

    def loss(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, None]:
        return -logp(logits_RV, row_T, batch).mean(), None

    return policy, logp, loss


def responses(count: int, length: int, vocabulary: int) -> Batch:
    """Return sequences of random tokens; all tokens but the first of each are trained on."""
    generator = torch.Generator().manual_seed(1)
    tokens_NL = torch.randint(vocabulary, (count, length + 1), generator=generator)
    lengths_N = torch.full((count,), length)
    return Batch(
        input_T=tokens_NL[:, :-1].flatten(),
        target_T=tokens_NL[:, 1:].flatten(),
        mask_T=torch.ones(count * length, dtype=torch.bool),
        seq_T=torch.arange(count).repeat_interleave(length),
        position_T=torch.arange(length).repeat(count),
        length_N=lengths_N,
        count_N=lengths_N,
        start_N=torch.zeros(count, dtype=torch.int64),
        in_order=True,
    )
