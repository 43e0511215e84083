"""Mathematics shared by the algorithms: pure functions of tensors, each with its equation.

Axes: T predicted tokens, N sequences. Token tensors share one floating dtype; results have it too. Masked entries may hold any
garbage (NaN included): every function says what it does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megarl.batch import Batch

SumOver = Callable[[Tensor], Tensor]
"""Sums a detached tensor over the ranks that share something (its user says what); the identity on one rank."""

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlKind = Literal["k1", "k2", "k3"]


class Average(NamedTuple):
    """A mean over the global batch, as the two 0-dim sums over what is held here: mean = sum of totals / sum of weights."""

    total: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Block:
    """Some entries of a batch as a policy term sees them: float [T], detached. Masked entries are undefined; d_T and mean_T are 0 there."""

    lp_T: Tensor  # log-prob under the policy that learns
    d_T: Tensor  # lp - old
    advantage_T: Tensor
    mean_T: Tensor | None  # mean over the whole sequence, wherever its tokens lie, of the algorithm's `sequence_term`, if it has one


@dataclass(frozen=True)
class Term:
    """One term of a loss, per token and detached: its value and its slope d value / d lp. Masked entries are undefined.

    In none of these losses does a gradient cross tokens: what ties the tokens of a sequence together is a constant for the gradient.
    So value and slope say everything, and no graph, no saved temporaries are needed. `counts` are 0-dim sums over the loss tokens
    held here, of which the mean is shown.
    """

    value_T: Tensor
    slope_T: Tensor
    counts: Mapping[str, Tensor] = field(default_factory=dict)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logp_T: Tensor, value_T: Tensor, slope_T: Tensor) -> Tensor:
        ctx.save_for_backward(slope_T)
        return value_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        (slope_T,) = ctx.saved_tensors
        return grad_T * slope_T, None, None


def attach(logp_T: Tensor, value_T: Tensor, slope_T: Tensor) -> Tensor:
    """A tensor equal to `value_T` whose gradient with respect to `logp_T` is `slope_T`, entry by entry.

    Args:
        logp_T: float [T], in the graph.
        value_T: float [T], or 0-dim where it is a sum over the entries; detached.
        slope_T: float [T], detached.

    Returns:
        Of the shape of `value_T`.
    """
    return _Attach.apply(logp_T, value_T, slope_T)


def token_weights(count_N: Tensor, aggregation: Aggregation, horizon: int | None = None) -> Tensor:
    """The weight of each loss token of a sequence, so that the batch's loss is sum_T weight * loss.

    | aggregation             | weight of a token of sequence i |
    | token-mean              | 1 / sum_j count_j               |
    | seq-mean-token-mean     | 1 / (B count_i)                 |
    | seq-mean-token-sum      | 1 / B                           |
    | seq-mean-token-sum-norm | 1 / (B horizon)                 |

    B counts the sequences with at least one loss token.

    Args:
        count_N: int [N], the loss tokens of every sequence of the GLOBAL mini-batch.
        aggregation: a row of the table.
        horizon: the longest response that there may be; needed by seq-mean-token-sum-norm alone.

    Returns:
        float64 [N]; sequences without loss tokens get 0.

    Raises:
        ValueError: no sequence has a loss token, or the horizon is missing.
    """
    used_N = count_N > 0
    sequences = int(used_N.sum())
    if sequences == 0:
        raise ValueError(f"no loss token in {len(count_N)} sequences")
    count = count_N.double()
    if aggregation == "token-mean":
        weight = torch.full_like(count, 1.0 / float(count.sum()))
    elif aggregation == "seq-mean-token-mean":
        weight = 1.0 / (sequences * count.clamp(min=1))
    elif aggregation == "seq-mean-token-sum":
        weight = torch.full_like(count, 1.0 / sequences)
    else:
        if horizon is None:
            raise ValueError("aggregation seq-mean-token-sum-norm needs a horizon (the maximum response length)")
        weight = torch.full_like(count, 1.0 / (sequences * horizon))
    return torch.where(used_N, weight, torch.zeros_like(weight))


def group_mean_std(reward_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation (n - 1; 0 for a group of one) and size of each sequence's group, all [N], float64 inside.

    `group_N` int [N] names the group (the prompt) of each sequence; groups may be uneven and in any order.
    """
    reward = reward_N.double()
    names, index = torch.unique(group_N, return_inverse=True)
    zero = torch.zeros(len(names), dtype=torch.float64)
    size = zero.index_add(0, index, torch.ones_like(reward))
    mean = zero.index_add(0, index, reward) / size
    square = zero.index_add(0, index, (reward - mean[index]) ** 2)
    std = (square / (size - 1).clamp(min=1)).sqrt()
    return mean[index], std[index], size[index]


def group_normalised(reward_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's advantage (arXiv:2402.03300, eq. 3): A_i = (R_i - mean_group) / (std_group + eps).

    Args:
        reward_N: float [N].
        group_N: int [N], as in `group_mean_std`.
        eps: added to the standard deviation.

    Returns:
        float32 [N]; 0 in a group of one or of equal rewards.
    """
    std = group_mean_std(reward_N, group_N)[1]
    return (group_centred(reward_N, group_N) / (std + eps)).float()


def group_centred(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """Dr.GRPO's advantage (arXiv:2503.20783): A_i = R_i - mean_group, float64 [N]; exactly 0 in a group of equal rewards."""
    mean, std, _ = group_mean_std(reward_N, group_N)
    return torch.where(std > 0, reward_N.double() - mean, torch.zeros_like(mean))


def leave_one_out(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """RLOO's advantage (arXiv:2402.14740, eq. 8): A_i = R_i - mean of the other G - 1 rewards = (R_i - mean_group) G / (G - 1).

    Returns float64 [N]; 0 in a group of one.
    """
    size = group_mean_std(reward_N, group_N)[2]
    return group_centred(reward_N, group_N) * size / (size - 1).clamp(min=1)


def batch_normalised(reward_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """LitePPO's advantage (arXiv:2508.08221): A_i = (R_i - mean_group) / (std of the raw rewards of all N responses, n - 1, + eps).

    Args:
        reward_N: float [N].
        group_N: int [N], as in `group_mean_std`.
        eps: added to the standard deviation.

    Returns:
        float64 [N]; 0 in a group of one or of equal rewards.
    """
    reward = reward_N.double()
    std = reward.std() if len(reward) > 1 else torch.zeros((), dtype=torch.float64)
    return group_centred(reward_N, group_N) / (std + eps)


def log_ratio(logp_T: Tensor, old_T: Tensor, batch: Batch) -> Tensor:
    """d_t = lp_t - old_t at loss tokens; value and gradient 0 elsewhere."""
    return torch.where(batch.mask_T, logp_T - old_T, 0.0)


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float, dual: float | None = None) -> Term:
    """PPO's pessimistic surrogate (arXiv:1707.06347, eq. 7), to be minimised: max(-r A, -clip(r, 1 - low, 1 + high) A).

    The slope is taken with respect to a log-prob of which r is the exponential, so it is -r A, and 0 where a clip holds.

    Args:
        ratio_T: float [T], r, a token's ratio or its sequence's; 1 at masked entries. It is used up.
        advantage_T: float [T], A.
        low: the ratio is clipped at 1 - low,
        high: and at 1 + high.
        dual: c > 1: the loss of a token with A < 0 is at most -c A (arXiv:1912.09729, eq. 4); None: no such limit.

    Returns:
        Value and slope [T], and as counts how many tokens are clipped: all, those with A > 0 (high), the others (low), and with `dual`
        those at its limit (lower).
    """
    gain_T = -advantage_T
    slope_T = ratio_T * gain_T
    value_T = ratio_T.clamp_(1 - low, 1 + high).mul_(gain_T)
    clips_T = value_T > slope_T
    torch.maximum(value_T, slope_T, out=value_T)
    slope_T.masked_fill_(clips_T, 0.0)
    total, upper = clips_T.count_nonzero(), (clips_T & (advantage_T > 0)).count_nonzero()
    counts = {"actor/pg_clipfrac": total, "actor/pg_clipfrac_high": upper, "actor/pg_clipfrac_low": total - upper}
    if dual is not None:
        ceiling_T = gain_T.mul_(dual)
        cut_T = (value_T > ceiling_T) & (advantage_T < 0)
        torch.where(cut_T, ceiling_T, value_T, out=value_T)
        slope_T.masked_fill_(cut_T, 0.0)
        counts["actor/pg_clipfrac_lower"] = cut_T.count_nonzero()
    return Term(value_T, slope_T, counts)


def kl_to_reference(lp_T: Tensor, ref_T: Tensor, batch: Batch, kind: KlKind, straight_through: bool) -> Term:
    """Per-token estimate of KL(pi || ref) (Schulman, 2020), with d = lp - ref.

    | kind | value           | slope      |
    | k1   | d               | 1          |
    | k2   | d^2 / 2         | d          |
    | k3   | exp(-d) - 1 + d | 1 - exp(-d) |

    On policy E[d grad lp] is the gradient of the KL: k2's slope is right, k1's has expectation 0 and k3's is right to first order.

    Args:
        lp_T: float [T], log-probs under the policy, detached.
        ref_T: float [T], log-probs under the reference.
        batch: says which entries are masked.
        kind: a row of the table.
        straight_through: keeps the value of the kind and takes k2's slope.

    Returns:
        Value and slope [T], 0 at masked entries but for the slope of k1, which is 1 at every entry.
    """
    d_T = log_ratio(lp_T, ref_T, batch)
    if kind == "k1":
        return Term(d_T, d_T if straight_through else torch.ones_like(d_T))
    if kind == "k2":
        return Term(d_T.square().mul_(0.5), d_T)
    slope_T = torch.neg(d_T).expm1_()
    value_T = slope_T + d_T
    return Term(value_T, d_T if straight_through else slope_T.neg_())


def sequence_kl(batch: Batch) -> Tensor:
    """k1 of each response, sum over its loss tokens of (old - ref), in nats [N]: on whole sequences of one rank.

    Reads `batch.extra_T["old_logp"]` and `["ref_logp"]`.
    """
    return batch.sequence_sum(batch.extra_T["old_logp"] - batch.extra_T["ref_logp"])


def token_rewards(batch: Batch, kl_coef: float) -> Tensor:
    """r_t = R at the last loss token of the response, and -kl_coef (old_t - ref_t) at every loss token; 0 at masked entries [T].

    On whole sequences. Reads `batch.extra_T["reward"]` (R, spread) and, with kl_coef > 0, `["old_logp"]` and `["ref_logp"]`.
    """
    kept_T = batch.mask_T.nonzero().squeeze(1)
    last_N = torch.full_like(batch.length_N, -1).scatter_reduce(0, batch.seq_T[kept_T], batch.position_T[kept_T], "amax")
    ends_T = batch.mask_T & (batch.position_T == batch.spread(last_N))
    reward_T = torch.where(ends_T, batch.extra_T["reward"], 0.0)
    if kl_coef > 0:
        reward_T = reward_T - kl_coef * log_ratio(batch.extra_T["old_logp"], batch.extra_T["ref_logp"], batch)
    return reward_T
