"""The tokens that top-p, top-k and min-p leave, and log-probs of the distribution over them, from vocabulary-parallel logits.

Each of the three rules keeps the tokens whose logit reaches a threshold, so that no rank needs an order of the whole vocabulary: the
threshold is found by bisection over the values of float32, with counts and masses summed over the ranks. What is kept is held as a list of
columns on the rank whose columns they are: a policy that is trained on needs the set of the policy that sampled, whatever its own logits.

Axes: R rows of logits, T scored entries, V local vocabulary shard, K kept columns of all entries, on this rank.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.config import Truncation
from megarl.parallel.logprobs import VocabularyShard

CHUNK = 1 << 24  # logits that are bisected together
LEAST = -0x7F800001  # the key of -inf


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of T entries that are columns of this rank; every entry's target is among them."""

    entry_K: Tensor
    """int64: the entry, ascending."""
    column_K: Tensor
    """int64: the column of this rank's shard."""
    outside_T: Tensor
    """bool: the target met not every rule and was added; the same on all ranks."""


def kept_tokens(
    logits_RV: Tensor,
    row_T: Tensor,
    target_T: Tensor,
    truncation: Truncation,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    vocabulary: int | None = None,
) -> KeptTokens:
    """Return the tokens that a truncated sampling leaves of each entry's distribution.

    Tokens tied at a threshold are all kept. So does vLLM for top-k; for top-p it keeps as many of them as reach the probability, chosen by
    the order of an unstable sort (v1/sample/ops/topk_topp_sampler.py:402). A target outside was kept by an engine whose logits differ in
    rounding: it is added.

    Reductions over `group`, of one number an entry: one MAX and one SUM; for top_k 32 SUM more, and for top_p 33. Entries are taken in
    chunks, so that no more than CHUNK logits are held in float32.

    Args:
        logits_RV: this rank's shard of the finite logits; rank r of `group` holds vocabulary entries r V to (r + 1) V - 1.
        row_T: int64, the row of each entry.
        target_T: int64, the global ids of the sampled tokens.
        truncation: the rules of the sampling.
        temperature: what the logits are divided by, above 0.
        group: the ranks that share the vocabulary; None: this rank holds all of it.
        vocabulary: entries from this global id on are padding and never kept; None: there is no padding.
    """
    shard = VocabularyShard.of(logits_RV, group, vocabulary)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    size = max(1, CHUNK // logits_RV.shape[1])
    for first in range(0, len(row_T), size):
        x_TV = logits_RV.detach()[row_T[first : first + size], : shard.real].float() / temperature
        kept_TV = x_TV >= _threshold(x_TV, truncation, group)[:, None]
        here_T, column_T = shard.place(target_T[first : first + size])
        mine_T = here_T.nonzero()[:, 0]
        inside_T = torch.zeros(len(here_T), device=x_TV.device)
        inside_T[mine_T] = kept_TV[mine_T, column_T[mine_T]].float()
        kept_TV[mine_T, column_T[mine_T]] = True
        entry_K, column_K = kept_TV.nonzero(as_tuple=True)
        parts.append((entry_K + first, column_K, _sum(inside_T, group) == 0))
    if not parts:
        none = torch.empty(0, dtype=torch.int64, device=logits_RV.device)
        return KeptTokens(none, none, none.bool())
    return KeptTokens(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


def kept_logprob_entropy(
    logits_RV: Tensor,
    row_T: Tensor,
    target_T: Tensor,
    kept: KeptTokens,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """lp_T = x[target] - log sum e^x over the kept tokens, with x = logits[row_T] / temperature; and the entropy of that distribution.

    One MAX reduction of [T] numbers and one SUM reduction of [3, T] over `group`. Only the kept columns are read, and only they have a
    gradient.

    Args:
        logits_RV, row_T, target_T, temperature, group: as in `kept_tokens`; each row once. float64 logits are computed in float64, all
            others in float32.
        kept: what `kept_tokens` returned for these entries, of these logits or of another policy's.
        overwrite: backward writes the gradient over the logits, which nothing else may need.

    Returns:
        The log-probs and the entropies in nats, each [T], the same on all ranks of `group`.
    """
    lp_T, entropy_T = _KeptLogprobEntropy.apply(logits_RV, row_T, target_T, kept, temperature, group, overwrite)
    return lp_T, entropy_T


class _KeptLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_RV: Tensor,
        row_T: Tensor,
        target_T: Tensor,
        kept: KeptTokens,
        temperature: float,
        group: dist.ProcessGroup | None,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        start = VocabularyShard.of(logits_RV, group, None).start
        x_K = logits_RV[row_T[kept.entry_K], kept.column_K]
        x_K = (x_K if x_K.dtype == torch.float64 else x_K.float()) / temperature
        top_T = _max(x_K.new_full((len(row_T),), -torch.inf).scatter_reduce_(0, kept.entry_K, x_K, "amax"), group)
        x_K = x_K - top_T[kept.entry_K]
        is_target_K = kept.column_K + start == target_T[kept.entry_K]
        share_K = x_K.exp()
        sums_3T = x_K.new_zeros(3, len(row_T))
        sums_3T.index_add_(1, kept.entry_K, torch.stack([torch.where(is_target_K, x_K, 0.0), share_K, share_K * x_K]))
        chosen_T, sum_T, dot_T = _sum(sums_3T, group)
        log_sum_T = sum_T.log()
        lp_T, entropy_T = chosen_T - log_sum_T, log_sum_T - dot_T / sum_T
        logp_K = x_K - log_sum_T[kept.entry_K]
        room_RV = logits_RV if overwrite else None
        ctx.save_for_backward(row_T, kept.entry_K, kept.column_K, is_target_K, logp_K, lp_T, entropy_T, room_RV)
        ctx.shape, ctx.dtype, ctx.temperature = logits_RV.shape, logits_RV.dtype, temperature
        ctx.set_materialize_grads(False)
        return lp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_lp_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        row_T, entry_K, column_K, is_target_K, logp_K, lp_T, entropy_T, room_RV = ctx.saved_tensors
        grad_K = torch.zeros_like(logp_K)
        if grad_lp_T is not None:  # d lp / dx = onehot - p; expm1 avoids the cancellation in 1 - p
            grad_K -= grad_lp_T[entry_K] * torch.where(is_target_K, torch.expm1(lp_T)[entry_K], logp_K.exp())
        if grad_entropy_T is not None:  # d H / dx = -p (log p + H)
            grad_K -= grad_entropy_T[entry_K] * logp_K.exp() * (logp_K + entropy_T[entry_K])
        grad_RV = logp_K.new_zeros(ctx.shape, dtype=ctx.dtype) if room_RV is None else room_RV.zero_()
        grad_RV[row_T[entry_K], column_K] = (grad_K / ctx.temperature).to(grad_RV.dtype)
        return grad_RV, None, None, None, None, None, None


def _threshold(x_TV: Tensor, truncation: Truncation, group: dist.ProcessGroup | None) -> Tensor:
    """The least x that is kept, float32 [T], the same on all ranks of `group`."""
    top_T = x_TV.new_full((len(x_TV),), -torch.inf) if x_TV.shape[1] == 0 else x_TV.amax(-1)
    top_T = _max(top_T, group)
    least_T = torch.full_like(top_T, -torch.inf)
    if truncation.min_p > 0:
        least_T = top_T + math.log(truncation.min_p)
    if truncation.top_k > 0:
        ones_TV = (x_TV >= least_T[:, None]).float()
        bound_T = torch.full_like(top_T, truncation.top_k, dtype=torch.float64)
        least_T = torch.maximum(least_T, _least_value(x_TV, ones_TV, bound_T, top_T, group))
    if truncation.top_p < 1:
        mass_TV = torch.where(x_TV >= least_T[:, None], (x_TV - top_T[:, None]).exp(), 0.0)
        bound_T = truncation.top_p * _sum(mass_TV.sum(-1, dtype=torch.float64), group)
        least_T = torch.maximum(least_T, _least_value(x_TV, mass_TV, bound_T, top_T, group))
    return least_T


def _least_value(x_TV: Tensor, weight_TV: Tensor, bound_T: Tensor, top_T: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The least float32 above which the weights sum to less than the bound, [T]: bisected over integers that order as the floats do."""
    key_TV = _key(x_TV)
    high_T = _key(top_T).long()  # nothing lies above it
    low_T = torch.full_like(high_T, LEAST - 1)
    for _ in range(32):
        middle_T = (low_T + high_T).div(2, rounding_mode="floor").clamp(min=LEAST)
        above_T = _sum((weight_TV * (key_TV > middle_T[:, None])).sum(-1, dtype=torch.float64), group)
        enough = above_T < bound_T
        high_T, low_T = torch.where(enough, middle_T, high_T), torch.where(enough, low_T, middle_T)
    return _value(high_T.int())


def _key(x: Tensor) -> Tensor:
    """int32 that order as the float32 do; -0 is 0."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def _value(key: Tensor) -> Tensor:
    return torch.where(key >= 0, key, key ^ 0x7FFFFFFF).view(torch.float32)


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, group=group)
    return x


def _max(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x
