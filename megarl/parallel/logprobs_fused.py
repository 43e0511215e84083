"""The GPU's `LogprobKernels`, in Triton: 6 bytes are moved for each bfloat16 logit, 2 in forward and 4 in backward.

A program of `_sums` reads one scored row once, from the left to the right. Each of its lanes keeps the maximum and both sums of what it has
seen, and rescales the sums when its maximum rises, once for `EACH` columns; the lanes are put together at the end of the row. A micro-batch
has thousands of rows, which occupy a GPU, so that no row is divided among programs. A program of `_gradient` writes one block of one row.

The exponentials are powers of two, the only ones that a GPU computes: that saves a product for each logit. Only a process with a GPU
imports this file, by way of its backend; elsewhere it runs in Triton's interpreter (`tests/distributed/test_fused_logprobs.py`).

Axes: R rows of logits, T scored entries, V local vocabulary shard; of a block: B columns, or L lanes of E columns.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# A thread reads 16 bytes at once: EACH columns of 16 bits. 8 warps of 32 threads read BLOCK columns, so that each thread has two of these
# reads under way. It takes several such programs on each multiprocessor to hide the memory's latency, and with this size they fit.
EACH, BLOCK, WARPS = 8, 4096, 8
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOG_2 = tl.constexpr(math.log(2))
LEAST = tl.constexpr(-1e4)  # 2^LEAST is 0, and 0 * LEAST as well, which it would not be for -inf
ONE_KERNEL = ["row_T", "top_T", "sum_T", "dot_T", "entry_R", "logz_T", "down_T", "slope_T", "real"]  # for any alignment of these


def local_top(logits_RV: Tensor, row_T: Tensor, real: int) -> Tensor:
    """See `LogprobKernels`."""
    return local_sums(logits_RV, row_T, real, 1.0)[0]  # reading the logits is what takes the time


def local_sums(logits_RV: Tensor, row_T: Tensor, real: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `LogprobKernels`."""
    top_T = torch.full((len(row_T),), -torch.inf, device=logits_RV.device)
    sum_T, dot_T = torch.zeros_like(top_T), torch.zeros_like(top_T)
    if real and len(row_T):
        steps, sizes = _row_steps(logits_RV), {"LANES": BLOCK // EACH, "EACH": EACH, "num_warps": WARPS}
        scale = 1 / temperature / math.log(2)
        _sums[(len(row_T),)](logits_RV, row_T.contiguous(), top_T, sum_T, dot_T, steps, logits_RV.shape[1], real, scale, **sizes)
    return top_T / temperature, sum_T, dot_T


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
    rows, width = logits_RV.shape
    entry_R = torch.full((rows,), -1, dtype=torch.int32, device=row_T.device)
    entry_R[row_T] = torch.arange(len(row_T), dtype=torch.int32, device=row_T.device)
    steps = _row_steps(grad_RV), _row_steps(logits_RV)
    if rows:
        grid = rows, triton.cdiv(width, BLOCK)
        numbers = *steps, width, real, 1 / temperature
        _gradient[grid](grad_RV, logits_RV, entry_R, logz_T, down_T, slope_T, *numbers, BLOCK=BLOCK, num_warps=WARPS)


def _row_steps(x_RV: Tensor) -> int:
    assert x_RV.stride(1) == 1, "the columns of a row lie side by side"
    return x_RV.stride(0)


@triton.jit(do_not_specialize=ONE_KERNEL)
def _sums(
    logits: tl.tensor,
    row_T: tl.tensor,
    top_T: tl.tensor,
    sum_T: tl.tensor,
    dot_T: tl.tensor,
    steps: tl.tensor,
    width: tl.tensor,
    real: tl.tensor,
    scale: tl.tensor,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
) -> None:
    """Of each row_T: the maximum, sum 2^((x - maximum) scale) and sum 2^((x - maximum) scale) (x - maximum) scale log 2."""
    entry = tl.program_id(0)
    column_LE = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    x = logits + tl.load(row_T + entry) * steps + column_LE  # in int64, as rows are: a micro-batch may have more than 2^31 logits
    top_L = tl.full((LANES,), LOWEST, tl.float32)
    sum_L = tl.zeros((LANES,), tl.float32)
    dot_L = tl.zeros((LANES,), tl.float32)
    whole = real // (LANES * EACH) * (LANES * EACH)
    for start in range(0, whole, LANES * EACH):
        top_L, sum_L, dot_L = _more(tl.load(x + start).to(tl.float32), top_L, sum_L, dot_L, scale)
    if whole < real:
        # Padding is read, too: `width` is a multiple of 16 where `real` need not be, and then wide reads remain possible.
        x_LE = tl.load(x + whole, mask=whole + column_LE < width, other=0.0).to(tl.float32)
        x_LE = tl.where(whole + column_LE < real, x_LE, float("-inf"))
        top_L, sum_L, dot_L = _more(x_LE, top_L, sum_L, dot_L, scale)
    top = tl.max(top_L, 0)
    sum_L, dot_L = _moved(top_L, top, sum_L, dot_L, scale)
    tl.store(top_T + entry, top)
    tl.store(sum_T + entry, tl.sum(sum_L, 0))
    tl.store(dot_T + entry, tl.sum(dot_L, 0) * LOG_2)


@triton.jit
def _more(
    x_LE: tl.tensor, top_L: tl.tensor, sum_L: tl.tensor, dot_L: tl.tensor, scale: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The maximum and both sums with E columns more in each lane."""
    higher_L = tl.maximum(top_L, tl.max(x_LE, 1))
    sum_L, dot_L = _moved(top_L, higher_L, sum_L, dot_L, scale)
    apart_LE = tl.maximum((x_LE - higher_L[:, None]) * scale, LEAST, propagate_nan=tl.PropagateNan.ALL)
    e_LE = tl.exp2(apart_LE)
    return higher_L, sum_L + tl.sum(e_LE, 1), dot_L + tl.sum(e_LE * apart_LE, 1)


@triton.jit
def _moved(top_L: tl.tensor, higher_L: tl.tensor, sum_L: tl.tensor, dot_L: tl.tensor, scale: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Both sums with respect to a higher maximum: e^(x - higher) = e^(top - higher) e^(x - top), likewise the dot."""
    shift_L = tl.maximum((top_L - higher_L) * scale, LEAST)
    factor_L = tl.exp2(shift_L)
    return sum_L * factor_L, (dot_L + sum_L * shift_L) * factor_L


@triton.jit(do_not_specialize=ONE_KERNEL)
def _gradient(
    grad: tl.tensor,
    logits: tl.tensor,
    entry_R: tl.tensor,
    logz_T: tl.tensor,
    down_T: tl.tensor,
    slope_T: tl.tensor,
    grad_steps: tl.tensor,
    steps: tl.tensor,
    width: tl.tensor,
    real: tl.tensor,
    scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """p (down + slope log p) with log p = x scale - logz in the scored rows, whose entry is not -1; elsewhere and in padding 0."""
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(entry_R + row)
    scored = entry >= 0
    x_B = tl.load(logits + row * steps + column_B, mask=(column_B < width) & scored, other=0.0).to(tl.float32)
    log_p_B = x_B * scale - tl.load(logz_T + entry, mask=scored, other=0.0)
    factor_B = tl.load(down_T + entry, mask=scored, other=0.0)
    if slope_T is not None:
        factor_B += log_p_B * tl.load(slope_T + entry, mask=scored, other=0.0)
    grad_B = tl.where(column_B < real, tl.exp(log_p_B) * factor_B, 0.0)
    tl.store(grad + row * grad_steps + column_B, grad_B, mask=column_B < width)
