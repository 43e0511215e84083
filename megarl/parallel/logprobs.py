"""Log-probability and entropy of the target tokens from vocabulary-parallel logits.

Nothing as large as the logits is kept besides the logits themselves: forward keeps three numbers per token, backward recomputes the softmax
and writes the gradient. What reads and writes the logits are three functions that the backend chooses, the `LogprobKernels`:
`logprobs_fused` on a GPU, `logprobs_chunked` on the CPU.

Axes: R rows of logits, T scored entries, V local vocabulary shard, K named tokens of an entry, B = K + 1 buckets: these, and all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.parallel.backend import choose

TOP_ELEMENTS = 1 << 24  # logits of which the likeliest are found at once: 64 MB in float32
MOST = 80.0  # e^80 is a float32; a remainder below e^-80 has no slope
NOTHING = -1e30  # stands for the logit of a token that is left out: finite, so that 0 times it is 0


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
    lp_T, entropy_T, _ = _LogprobEntropy.apply(logits_RV, row_T, target_T, temperature, group, vocabulary, overwrite, None)
    return lp_T, entropy_T


def logprob_entropy_buckets(
    logits_RV: Tensor,
    row_T: Tensor,
    target_T: Tensor,
    token_TK: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocabulary: int | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`logprob_entropy`, and the log-probs of some tokens of each entry and of all others together.

    The others are summed themselves, not taken as 1 minus the rest, so that a small remainder is exact. This reads the logits once more,
    and reduces [T, K] and twice [T] numbers over `group`.

    Args:
        token_TK: int64 [T, K], global token ids, different ones in each row.
        logits_RV, row_T, target_T, temperature, group, vocabulary, overwrite: as in `logprob_entropy`.

    Returns:
        Log-probs and entropies as in `logprob_entropy`, and the buckets' log-probs, float32 [T, K + 1]; that of the others last, below
        -1e29 if there are none.
    """
    lp_T, entropy_T, lp_TB = _LogprobEntropy.apply(logits_RV, row_T, target_T, temperature, group, vocabulary, overwrite, token_TK)
    return lp_T, entropy_T, lp_TB


def top_buckets(
    logits_RV: Tensor,
    row_T: Tensor,
    count: int,
    among: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocabulary: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the likeliest tokens of each entry, and their log-probs and that of all others together. It has no gradient.

    Args:
        count: K, the number of tokens.
        among: only tokens below this global id are named; at least `count`.
        logits_RV, row_T, temperature, group, vocabulary: as in `logprob_entropy`.

    Returns:
        Global token ids, int64 [T, K], the likeliest first, and log-probs, float32 [T, K + 1]; the same on all ranks of `group`.
    """
    shard, ranks = VocabularyShard.of(logits_RV, group, vocabulary), 1 if group is None else group.size()
    named, device = max(0, min(shard.real, among - shard.start)), logits_RV.device
    own = min(count, named)
    value_TK = torch.full((len(row_T), count), -torch.inf, device=device)
    token_TK = torch.zeros(len(row_T), count, dtype=torch.int64, device=device)
    step = max(1, TOP_ELEMENTS // max(1, named))
    for start in range(0, len(row_T) if own else 0, step):
        top = logits_RV[row_T[start : start + step], :named].float().topk(own, dim=1)
        value_TK[start : start + step, :own], token_TK[start : start + step, :own] = top.values, top.indices + shard.start
    if ranks > 1:
        values, tokens = ([torch.empty_like(one) for _ in range(ranks)] for one in (value_TK, token_TK))
        dist.all_gather(values, value_TK, group=group)
        dist.all_gather(tokens, token_TK, group=group)
        best = torch.cat(values, dim=1).topk(count, dim=1)
        token_TK = torch.cat(tokens, dim=1).gather(1, best.indices)
    with torch.no_grad():
        *_, lp_TB = logprob_entropy_buckets(logits_RV, row_T, token_TK[:, 0], token_TK, temperature, group, vocabulary)
    return token_TK, lp_TB


def likeliest(
    logits_RV: Tensor, row_T: Tensor, target_T: Tensor, group: dist.ProcessGroup | None = None, vocabulary: int | None = None
) -> Tensor:
    """Whether each target is its row's likeliest token (or tied for it), bool [T]. Arguments as in `logprob_entropy`.

    One MAX reduction of [2, T] numbers over `group`.
    """
    shard = VocabularyShard.of(logits_RV, group, vocabulary)
    mine_T, column_T = shard.place(target_T)
    both = torch.full((2, len(row_T)), -torch.inf, device=logits_RV.device)
    both[0] = torch.where(mine_T, logits_RV[row_T, column_T].float(), -torch.inf)
    both[1] = choose().logprob_kernels.local_top(logits_RV, row_T, shard.real)
    if group is not None and group.size() > 1:
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both[0] >= both[1]


@dataclass(frozen=True)
class VocabularyShard:
    """Where this rank's logits lie in the vocabulary."""

    start: int  # global id of the first column
    real: int  # columns that are not padding

    @staticmethod
    def of(logits_RV: Tensor, group: dist.ProcessGroup | None, vocabulary: int | None) -> VocabularyShard:
        width = logits_RV.shape[1]
        start = width * group.rank() if group is not None else 0
        return VocabularyShard(start, width if vocabulary is None else max(0, min(width, vocabulary - start)))

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
        token_TK: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        shard, kernels = VocabularyShard.of(logits_RV, group, vocabulary), choose().logprob_kernels
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
        logz_T, lp_TB = top_T + log_sum_T, None
        if token_TK is not None:
            lp_TB = _bucket_logits(logits_RV, row_T, token_TK, temperature, group, shard, kernels).sub_(logz_T[:, None])
        ctx.save_for_backward(logits_RV, row_T, target_T, logz_T, lp_T, entropy_T, token_TK, lp_TB)
        ctx.shard, ctx.kernels, ctx.temperature, ctx.overwrite = shard, kernels, temperature, overwrite
        ctx.set_materialize_grads(False)
        return lp_T, entropy_T, lp_TB

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_lp_T: Tensor | None, grad_entropy_T: Tensor | None, grad_lp_TB: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_RV, row_T, target_T, logz_T, lp_T, entropy_T, token_TK, lp_TB = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        kernels: LogprobKernels = ctx.kernels
        # d lp / dx = (onehot - p) / temperature ; d H / dx = -p (log p + H) / temperature
        down_T = torch.zeros_like(lp_T) if grad_lp_T is None else grad_lp_T / -ctx.temperature
        slope_T = None if grad_entropy_T is None else grad_entropy_T / -ctx.temperature
        at_target_T = down_T * torch.expm1(lp_T)  # avoids the cancellation in 1 - p
        if slope_T is not None:
            down_T = down_T + slope_T * entropy_T
            at_target_T = at_target_T + slope_T * lp_T.exp() * (lp_T + entropy_T)
        if grad_lp_TB is not None:
            # d lp_b / dx = (onehot_b - p) / temperature; of the others, whose sum is q, (p / q - p) / temperature, and -p at named tokens.
            # These are written, not corrected: with a small q, what the others get is much larger.
            p_TK, sum_T = lp_TB[:, :-1].exp(), grad_lp_TB.sum(1)
            before_TK = down_T[:, None] if slope_T is None else down_T[:, None] + slope_T[:, None] * lp_TB[:, :-1]
            before_TK = torch.where(token_TK == target_T[:, None], at_target_T[:, None], p_TK * before_TK)
            at_named_TK = before_TK + (grad_lp_TB[:, :-1] - p_TK * sum_T[:, None]) / ctx.temperature
            others_T = (grad_lp_TB[:, -1] * (-lp_TB[:, -1]).clamp(max=MOST).exp() - sum_T) / ctx.temperature
            down_T, at_target_T = down_T + others_T, at_target_T + others_T * lp_T.exp()
        grad_RV = logits_RV if ctx.overwrite else torch.empty_like(logits_RV)
        kernels.write_gradient(grad_RV, logits_RV, row_T, shard.real, ctx.temperature, logz_T, down_T, slope_T)
        mine_T, column_T = shard.place(target_T)
        grad_RV[row_T, column_T] = torch.where(mine_T, at_target_T.to(grad_RV.dtype), grad_RV[row_T, column_T])
        if grad_lp_TB is not None:
            mine_TK, column_TK = shard.place(token_TK)
            grad_RV[row_T[:, None].expand_as(column_TK)[mine_TK], column_TK[mine_TK]] = at_named_TK[mine_TK].to(grad_RV.dtype)
        return grad_RV, None, None, None, None, None, None, None


def _bucket_logits(
    logits_RV: Tensor,
    row_T: Tensor,
    token_TK: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None,
    shard: VocabularyShard,
    kernels: LogprobKernels,
) -> Tensor:
    """The logits / temperature of the named tokens, and log sum e^x over all others, float32 [T, K + 1]."""
    logits_RV = logits_RV.data  # written and restored, unseen by autograd
    mine_TK, column_TK = shard.place(token_TK)
    places = row_T[:, None].expand_as(column_TK)[mine_TK], column_TK[mine_TK]
    kept = logits_RV[places]
    named_TK = torch.zeros(token_TK.shape, device=logits_RV.device).masked_scatter_(mine_TK, kept.float() / temperature)
    logits_RV[places] = NOTHING
    top_T, sum_T, _ = kernels.local_sums(logits_RV, row_T, shard.real, temperature)
    logits_RV[places] = kept
    if group is not None and group.size() > 1:
        here_T = top_T.clone()
        dist.all_reduce(top_T, op=dist.ReduceOp.MAX, group=group)
        sums = torch.cat([named_TK, (sum_T * (here_T - top_T).clamp_(min=-1e4).exp())[:, None]], dim=1)
        dist.all_reduce(sums, group=group)
        named_TK, sum_T = sums[:, :-1], sums[:, -1]
    return torch.cat([named_TK, (top_T + sum_T.log())[:, None]], dim=1)
