"""The CPU's `LogprobKernels`: torch's operations, chunk by chunk.

A chunk is processed in two small buffers that are allocated once, so that every pass except the first read and the last write stays in the
core's cache.

Axes: R rows of logits, T scored entries, C entries of a chunk, V local vocabulary shard.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 17  # of float32: two chunks (1 MB) fit in a core's L2


def local_top(logits_RV: Tensor, row_T: Tensor, real: int) -> Tensor:
    """See `LogprobKernels`."""
    top_T = torch.full((len(row_T),), -torch.inf, device=logits_RV.device)
    for entries, _, x_CV, _ in _chunks(logits_RV, row_T, real, 1.0):
        torch.amax(x_CV, -1, out=top_T[entries])
    return top_T


def local_sums(logits_RV: Tensor, row_T: Tensor, real: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `LogprobKernels`."""
    top_T = torch.full((len(row_T),), -torch.inf, device=logits_RV.device)
    sum_T, dot_T = torch.zeros_like(top_T), torch.zeros_like(top_T)
    for entries, _, x_CV, e_CV in _chunks(logits_RV, row_T, real, temperature):
        torch.amax(x_CV, -1, out=top_T[entries])
        x_CV.sub_(top_T[entries, None])
        torch.exp(x_CV, out=e_CV)
        torch.sum(e_CV, -1, out=sum_T[entries])
        torch.linalg.vecdot(e_CV, x_CV, out=dot_T[entries])
    return top_T, sum_T, dot_T


def write_gradient(
    grad_RV: Tensor,
    logits_RV: Tensor,
    row_T: Tensor,
    real: int,
    temperature: float,
    logz_T: Tensor,
    down_T: Tensor,
    slope_T: Tensor | None,
) -> None:
    """See `LogprobKernels`."""
    for entries, rows, x_CV, p_CV in _chunks(logits_RV, row_T, real, temperature):
        x_CV.sub_(logz_T[entries, None])
        torch.exp(x_CV, out=p_CV)
        if slope_T is None:
            p_CV.mul_(down_T[entries, None])
        else:
            p_CV.mul_(x_CV.mul_(slope_T[entries, None]).add_(down_T[entries, None]))
        grad_RV[rows, :real] = p_CV if isinstance(rows, slice) else p_CV.to(grad_RV.dtype)
    grad_RV[:, real:] = 0
    if len(row_T) < len(grad_RV):
        rest_R = torch.ones(len(grad_RV), dtype=torch.bool, device=grad_RV.device)
        rest_R[row_T] = False
        grad_RV[rest_R] = 0


def _chunks(logits_RV: Tensor, row_T: Tensor, real: int, temperature: float) -> Iterator[tuple[slice, slice | Tensor, Tensor, Tensor]]:
    """Yield (entries, their rows, logits / temperature of the real columns in float32, a buffer like it). Both buffers are reused."""
    if not real:
        return
    step = max(1, min(len(row_T), CHUNK_ELEMENTS // real))
    x_CV, other_CV = torch.empty(2, step, real, device=logits_RV.device)
    rows = row_T.tolist()
    ascending = all(one < other for one, other in zip(rows, rows[1:], strict=False))
    for start in range(0, len(rows), step):
        end = min(start + step, len(rows))
        # Rows are mostly contiguous, and then need no gather.
        neighbours = ascending and rows[end - 1] - rows[start] == end - start - 1
        chosen = slice(rows[start], rows[end - 1] + 1) if neighbours else row_T[start:end]
        x = x_CV[: end - start].copy_(logits_RV[chosen, :real])
        if temperature != 1:
            x.div_(temperature)
        yield slice(start, end), chosen, x, other_CV[: end - start]
