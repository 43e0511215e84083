"""Log-probability and entropy of the target tokens from vocabulary-parallel logits, chunk by chunk.

Nothing as large as the logits is kept besides the logits themselves: forward keeps three numbers per token, backward recomputes each
chunk's softmax and writes the gradient. A chunk is processed in two small buffers that are allocated once, so that on a CPU every pass
except the first read and the last write stays in the core's cache.

Axes: R rows of logits, T scored entries, C entries of a chunk, V local vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of a float32 chunk. CPU: two chunks (1 MB) fit in a core's L2. Elsewhere: two chunks are 64 MB, large enough for few launches.
CHUNK_ELEMENTS = {"cpu": 1 << 17}
CHUNK_ELEMENTS_ELSEWHERE = 1 << 23


def logprob_entropy(
    logits_RV: Tensor,
    row_T: Tensor,
    target_T: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocabulary: int | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """lp_T = log softmax(logits[row_T] / temperature)[target_T] and its entropy -sum p log p.

    One MAX reduction of [T] numbers and one SUM reduction of [3, T] over `group`; the logits are never gathered. An entropy that the loss
    does not use costs nothing in backward.

    Args:
        logits_RV: this rank's shard [R, V] of the finite logits, any float dtype; rank r of `group` holds vocabulary entries r V to
            (r + 1) V - 1.
        row_T: int64 [T], the row of each scored entry, each row once; rows left out get zero gradient.
        target_T: int64 [T], global token ids.
        temperature: what the logits are divided by, above 0.
        group: the tensor-parallel ranks that share the vocabulary; None: this rank holds all of it.
        vocabulary: entries from this global id on are padding and have probability 0; None: there is no padding.
        overwrite: backward writes the gradient over the logits, so that it takes no memory of its own. Nothing else may need the logits
            (autograd raises if something in the graph does).

    Returns:
        The log-probs and the entropies in nats, each float32 [T], the same on all ranks of `group`.
    """
    lp_T, entropy_T = _LogprobEntropy.apply(logits_RV, row_T, target_T, temperature, group, vocabulary, overwrite)
    return lp_T, entropy_T


def likeliest(
    logits_RV: Tensor, row_T: Tensor, target_T: Tensor, group: dist.ProcessGroup | None = None, vocabulary: int | None = None
) -> Tensor:
    """Whether each target is its row's likeliest token (or tied for it), bool [T]. Arguments as in `logprob_entropy`.

    One MAX reduction of [2, T] numbers over `group`.
    """
    width = logits_RV.shape[1]
    start = width * group.rank() if group is not None else 0
    shard = _Shard(start, width if vocabulary is None else max(0, min(width, vocabulary - start)), 1.0, overwrite=False)
    mine_T, column_T = shard.place(target_T)
    both = torch.full((2, len(row_T)), -torch.inf, device=logits_RV.device)
    both[0] = torch.where(mine_T, logits_RV[row_T, column_T].float(), -torch.inf)
    for entries, _, x_CV, _ in _chunks(logits_RV, row_T, shard):
        torch.amax(x_CV, -1, out=both[1, entries])
    if group is not None and group.size() > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0] >= both[1]


@dataclass(frozen=True)
class _Shard:
    """Where this rank's logits lie in the vocabulary."""

    start: int  # global id of the first column
    real: int  # columns that are not padding
    temperature: float
    overwrite: bool

    def place(self, target_T: Tensor) -> tuple[Tensor, Tensor]:
        """(true where the target is one of this rank's columns, its column or 0)."""
        local_T = target_T - self.start
        mine_T = (local_T >= 0) & (local_T < self.real)
        return mine_T, torch.where(mine_T, local_T, 0)


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
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        width = logits_RV.shape[1]
        start = width * group.rank() if group is not None else 0
        shard = _Shard(start, width if vocabulary is None else max(0, min(width, vocabulary - start)), temperature, overwrite)
        top_T, sum_T, dot_T = _local_sums(logits_RV, row_T, shard)
        mine_T, column_T = shard.place(target_T)
        picked_T = logits_RV[row_T, column_T].float() / temperature
        if group is not None and group.size() > 1:
            here_T = top_T.clone()
            dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
            # Rescale to the common maximum: sum e^(x - top) = e^(here - top) sum e^(x - here), likewise the dot. Padding alone gives -inf.
            shift_T = (here_T - top_T).clamp_(min=-1e4)
            scale_T = shift_T.exp()
            sums = torch.stack([torch.where(mine_T, picked_T - top_T, 0.0), sum_T * scale_T, (dot_T + sum_T * shift_T) * scale_T])
            dist.all_reduce(sums, group=group)
            chosen_T, sum_T, dot_T = sums.unbind()
        else:
            chosen_T = torch.where(mine_T, picked_T - top_T, 0.0)
        log_sum_T = sum_T.log()
        lp_T, entropy_T = chosen_T - log_sum_T, log_sum_T - dot_T / sum_T
        ctx.save_for_backward(logits_RV, row_T, target_T, top_T + log_sum_T, lp_T, entropy_T)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return lp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_lp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_RV, row_T, target_T, logz_T, lp_T, entropy_T = ctx.saved_tensors
        shard: _Shard = ctx.shard
        # d lp / dx = (onehot - p) / temperature ; d H / dx = -p (log p + H) / temperature
        down_T = torch.zeros_like(lp_T) if grad_lp_T is None else grad_lp_T / -shard.temperature
        slope_T = None if grad_entropy_T is None else grad_entropy_T / -shard.temperature
        at_target_T = down_T * torch.expm1(lp_T)  # avoids the cancellation in 1 - p
        if slope_T is not None:
            down_T = down_T + slope_T * entropy_T
            at_target_T = at_target_T + slope_T * lp_T.exp() * (lp_T + entropy_T)
        grad_RV = logits_RV if shard.overwrite else torch.empty_like(logits_RV)
        for entries, rows, x_CV, p_CV in _chunks(logits_RV, row_T, shard):
            x_CV.sub_(logz_T[entries, None])
            torch.exp(x_CV, out=p_CV)
            if slope_T is None:
                p_CV.mul_(down_T[entries, None])
            else:
                p_CV.mul_(x_CV.mul_(slope_T[entries, None]).add_(down_T[entries, None]))
            grad_RV[rows, : shard.real] = p_CV if isinstance(rows, slice) else p_CV.to(grad_RV.dtype)
        mine_T, column_T = shard.place(target_T)
        grad_RV[row_T, column_T] = torch.where(mine_T, at_target_T.to(grad_RV.dtype), grad_RV[row_T, column_T])
        _clear_rest(grad_RV, row_T, shard.real)
        return grad_RV, None, None, None, None, None, None


def _local_sums(logits_RV: Tensor, row_T: Tensor, shard: _Shard) -> tuple[Tensor, Tensor, Tensor]:
    """For each entry, over this rank's columns: the maximum, sum e^(x - maximum), and sum e^(x - maximum) (x - maximum); float32 [T]."""
    top_T = torch.full((len(row_T),), -torch.inf, device=logits_RV.device)
    sum_T, dot_T = torch.zeros_like(top_T), torch.zeros_like(top_T)
    for entries, _, x_CV, e_CV in _chunks(logits_RV, row_T, shard):
        torch.amax(x_CV, -1, out=top_T[entries])
        x_CV.sub_(top_T[entries, None])
        torch.exp(x_CV, out=e_CV)
        torch.sum(e_CV, -1, out=sum_T[entries])
        torch.linalg.vecdot(e_CV, x_CV, out=dot_T[entries])
    return top_T, sum_T, dot_T


def _chunks(logits_RV: Tensor, row_T: Tensor, shard: _Shard) -> Iterator[tuple[slice, slice | Tensor, Tensor, Tensor]]:
    """Yield (entries, their rows, logits / temperature of the real columns in float32, a buffer like it). Both buffers are reused."""
    if not shard.real:
        return
    step = max(1, min(len(row_T), CHUNK_ELEMENTS.get(logits_RV.device.type, CHUNK_ELEMENTS_ELSEWHERE) // shard.real))
    x_CV, other_CV = torch.empty(2, step, shard.real, device=logits_RV.device)
    rows = row_T.tolist()
    ascending = all(one < other for one, other in zip(rows, rows[1:], strict=False))
    for start in range(0, len(rows), step):
        end = min(start + step, len(rows))
        # Rows are mostly contiguous, and then need no gather.
        neighbours = ascending and rows[end - 1] - rows[start] == end - start - 1
        chosen = slice(rows[start], rows[end - 1] + 1) if neighbours else row_T[start:end]
        x = x_CV[: end - start].copy_(logits_RV[chosen, : shard.real])
        if shard.temperature != 1:
            x.div_(shard.temperature)
        yield slice(start, end), chosen, x, other_CV[: end - start]


def _clear_rest(grad_RV: Tensor, row_T: Tensor, real: int) -> None:
    """Zero the gradient of padding columns and of rows that were not scored."""
    grad_RV[:, real:] = 0
    if len(row_T) < len(grad_RV):
        rest_R = torch.ones(len(grad_RV), dtype=torch.bool, device=grad_RV.device)
        rest_R[row_T] = False
        grad_RV[rest_R] = 0
