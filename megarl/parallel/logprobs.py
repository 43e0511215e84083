"""Log-probability and entropy of the target tokens from vocabulary-parallel logits.

Nothing as large as the logits is kept besides the logits themselves: forward keeps three numbers per token, backward recomputes the softmax
and writes the gradient. What reads and writes the logits are three functions that the backend chooses, the `LogprobKernels`:
`logprobs_fused` on a GPU, `logprobs_chunked` on the CPU.

Axes: R rows of logits, T scored entries, V local vocabulary shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.parallel.backend import choose


class LogprobKernels(Protocol):
    """What reads and writes this rank's logits; below, x stands for logits / temperature in float32."""

    def local_top(self, logits_RV: Tensor, row_T: Tensor, real: int) -> Tensor:
        """Return each entry's largest logit.

        Args:
            logits_RV: this rank's columns.
            row_T: the row of each entry, each row once.
            real: columns that are not padding; the values of the others do not matter.

        Returns:
            float32 [T]; without real columns -inf.
        """

    def local_sums(self, logits_RV: Tensor, row_T: Tensor, real: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Reduce each entry's row.

        Args:
            logits_RV, row_T, real: as in `local_top`.
            temperature: what the logits are divided by.

        Returns:
            The maximum of x, sum e^(x - maximum), and sum e^(x - maximum) (x - maximum), each float32 [T]; without real columns -inf, 0, 0.
        """

    def write_gradient(
        self,
        grad_RV: Tensor,
        logits_RV: Tensor,
        row_T: Tensor,
        real: int,
        temperature: float,
        logz_T: Tensor,
        down_T: Tensor,
        slope_T: Tensor | None,
    ) -> None:
        """Write p (down + slope log p) with log p = x - logz into the entries' rows, and 0 into padding and the rows without an entry.

        Args:
            grad_RV: written, every element; may be the logits themselves.
            logits_RV, row_T, real, temperature: as in `local_sums`.
            logz_T: log sum e^x over the columns of all ranks, float32 [T].
            down_T: float32 [T].
            slope_T: float32 [T]; None: 0, at no cost.
        """


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
    shard = _Shard.of(logits_RV, group, vocabulary)
    mine_T, column_T = shard.place(target_T)
    both = torch.full((2, len(row_T)), -torch.inf, device=logits_RV.device)
    both[0] = torch.where(mine_T, logits_RV[row_T, column_T].float(), -torch.inf)
    both[1] = choose().logprob_kernels.local_top(logits_RV, row_T, shard.real)
    if group is not None and group.size() > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0] >= both[1]


@dataclass(frozen=True)
class _Shard:
    """Where this rank's logits lie in the vocabulary."""

    start: int  # global id of the first column
    real: int  # columns that are not padding

    @staticmethod
    def of(logits_RV: Tensor, group: dist.ProcessGroup | None, vocabulary: int | None) -> _Shard:
        width = logits_RV.shape[1]
        start = width * group.rank() if group is not None else 0
        return _Shard(start, width if vocabulary is None else max(0, min(width, vocabulary - start)))

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
        shard, kernels = _Shard.of(logits_RV, group, vocabulary), choose().logprob_kernels
        top_T, sum_T, dot_T = kernels.local_sums(logits_RV, row_T, shard.real, temperature)
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
        ctx.shard, ctx.kernels, ctx.temperature, ctx.overwrite = shard, kernels, temperature, overwrite
        ctx.set_materialize_grads(False)
        return lp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_lp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_RV, row_T, target_T, logz_T, lp_T, entropy_T = ctx.saved_tensors
        shard: _Shard = ctx.shard
        kernels: LogprobKernels = ctx.kernels
        # d lp / dx = (onehot - p) / temperature ; d H / dx = -p (log p + H) / temperature
        down_T = torch.zeros_like(lp_T) if grad_lp_T is None else grad_lp_T / -ctx.temperature
        slope_T = None if grad_entropy_T is None else grad_entropy_T / -ctx.temperature
        at_target_T = down_T * torch.expm1(lp_T)  # avoids the cancellation in 1 - p
        if slope_T is not None:
            down_T = down_T + slope_T * entropy_T
            at_target_T = at_target_T + slope_T * lp_T.exp() * (lp_T + entropy_T)
        grad_RV = logits_RV if ctx.overwrite else torch.empty_like(logits_RV)
        kernels.write_gradient(grad_RV, logits_RV, row_T, shard.real, ctx.temperature, logz_T, down_T, slope_T)
        mine_T, column_T = shard.place(target_T)
        grad_RV[row_T, column_T] = torch.where(mine_T, at_target_T.to(grad_RV.dtype), grad_RV[row_T, column_T])
        return grad_RV, None, None, None, None, None, None
