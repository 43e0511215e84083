"""Log-probability and entropy of the target tokens from vocabulary-parallel logits, chunk by chunk.

Nothing of the logits' size is kept beside the logits themselves: forward keeps two numbers a token, backward recomputes each chunk's
softmax and writes the gradient. Axes: R rows of logits, T scored entries, V local vocabulary shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20  # about 4 MB of float32 at a time: inside a core's cache share, small against any real logits


def logprob_entropy(
    logits_RV: Tensor,
    row_T: Tensor,
    target_T: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """lp_T = log softmax(logits[row_T] / temperature)[target_T] and its entropy -sum p log p, both float32 [T].

    logits_RV: this rank's shard [R, V] of the logits, any float dtype; rank r of `group` holds vocabulary entries r V .. (r + 1) V - 1.
    row_T: int64 [T], distinct rows to score; rows left out get zero gradient. target_T: int64 [T], global token ids.
    vocabulary: entries from this global id on are padding and have probability 0.
    One MAX and one SUM reduction over `group` per chunk; the logits are never gathered.
    """
    lp_T, entropy_T = _LogprobEntropy.apply(logits_RV, row_T, target_T, temperature, group, vocabulary)
    return lp_T, entropy_T


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_RV: Tensor,
        row_T: Tensor,
        target_T: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        vocabulary: int | None,
    ) -> tuple[Tensor, Tensor]:
        shard = logits_RV.shape[1]
        ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        start = rank * shard
        real = shard if vocabulary is None else max(0, min(shard, vocabulary - start))
        logz, lp, entropy = (torch.empty(len(row_T), dtype=torch.float32, device=logits_RV.device) for _ in range(3))
        for chunk in _chunks(len(row_T), shard):
            x = logits_RV[row_T[chunk]].float() / temperature
            x[:, real:] = -torch.inf
            top = x.amax(-1)
            if ranks > 1:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            x -= top[:, None]
            local = target_T[chunk] - start
            mine = (local >= 0) & (local < real)
            picked = x.gather(-1, local.clamp(0, shard - 1)[:, None]).squeeze(-1)
            exp = x.exp()
            sums = torch.stack([torch.where(mine, picked, 0.0), exp.sum(-1), (exp * x.masked_fill_(exp == 0, 0.0)).sum(-1)])
            if ranks > 1:
                dist.all_reduce(sums, group=group)
            log_sum = sums[1].log()
            lp[chunk] = sums[0] - log_sum
            entropy[chunk] = log_sum - sums[2] / sums[1]
            logz[chunk] = top + log_sum
        ctx.save_for_backward(logits_RV, row_T, target_T, logz, entropy)
        ctx.temperature, ctx.start, ctx.real = temperature, start, real
        return lp, entropy

    @staticmethod
    def backward(ctx: Any, grad_lp_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_RV, row_T, target_T, logz, entropy = ctx.saved_tensors
        shard = logits_RV.shape[1]
        grad = torch.empty_like(logits_RV)
        if len(row_T) < len(grad):
            grad.zero_()
        with_entropy = bool(grad_entropy_T.any())
        for chunk in _chunks(len(row_T), shard):
            # d lp / dx = (onehot - p) / temperature ; d H / dx = -p (log p + H) / temperature
            log_p = (logits_RV[row_T[chunk]].float() / ctx.temperature).sub_(logz[chunk, None])
            log_p[:, ctx.real :] = -torch.inf
            p = log_p.exp()
            g = p * -grad_lp_T[chunk, None]
            if with_entropy:
                log_p.masked_fill_(p == 0, 0.0)
                g -= p * log_p.add_(entropy[chunk, None]) * grad_entropy_T[chunk, None]
            local = target_T[chunk] - ctx.start
            mine = (local >= 0) & (local < ctx.real)
            g.scatter_add_(-1, local.clamp(0, shard - 1)[:, None], torch.where(mine, grad_lp_T[chunk], 0.0)[:, None])
            grad[row_T[chunk]] = g.div_(ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None, None


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
