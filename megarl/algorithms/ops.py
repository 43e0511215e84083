"""Mathematics shared by the algorithms: pure functions of tensors, each with its equation.

Axes: T predicted tokens, N sequences. All token tensors, including the results, have one floating dtype. Masked entries may hold any
garbage (including NaN); every function says how it treats them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch

SumOver = Callable[[Tensor], Tensor]
"""Sums a detached tensor over a group of ranks (the caller says which); the identity on one rank."""

Averaging = Annotated[
    Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"],
    Field(description="How the tokens' losses are averaged: over all tokens, or first per response (mean or sum), then over responses."),
]
Aggregation = Annotated[
    Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
    Field(
        description="How the tokens' losses are averaged: over all tokens; first per response (mean or sum), then over responses; or as "
        "their sum divided by responses x horizon."
    ),
]

SequenceCount = Annotated[
    Literal["trained", "all", "one"] | None,
    Field(
        description="What a mean over responses divides by: the responses with a loss token (trained), those that take part in the step "
        "(all), or 1 (one: their sum). null: all with seq-mean-token-sum-norm, else trained."
    ),
]


class Average(NamedTuple):
    """A mean over the global batch, as two 0-dim sums over this rank's share: mean = sum of totals / sum of weights."""

    total: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Block:
    """Some entries of a batch, as a policy term sees them: float [T], detached. Masked entries are undefined, but 0 in d_T and mean_T."""

    lp_T: Tensor  # log-prob under the policy being trained
    d_T: Tensor  # lp - old
    advantage_T: Tensor
    count_T: Tensor  # loss tokens of the whole sequence, at least 1; mean_T * count_T is the sum over it
    mean_T: Tensor | None  # mean over the whole sequence, across ranks, of the algorithm's `sequence_term`, if it has one
    roll_T: Tensor  # log-prob that the rollout engine reported
    mask_T: Tensor  # bool [T], the loss tokens
    chosen_T: Tensor | None = None  # bool [T], the tokens that the algorithm's `selection` has chosen, if it has one


@dataclass(frozen=True)
class Term:
    """One term of a loss, per token and detached: its value and its slope d value / d lp. Masked entries are undefined.

    No gradient crosses tokens in any of these losses: the gradient treats whatever couples the tokens of a sequence as a constant.
    So value and slope suffice, without a graph or saved temporaries. `counts` are 0-dim sums over this rank's loss tokens, reported
    as means. `clips_T`, if given, marks the clipped tokens: bool [T].
    """

    value_T: Tensor
    slope_T: Tensor
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    clips_T: Tensor | None = None


def attach(logp_T: Tensor, value_T: Tensor, slope_T: Tensor) -> Tensor:
    """A tensor equal to `value_T` whose gradient with respect to `logp_T` is `slope_T`, entry by entry.

    Args:
        logp_T: float [T], in the graph.
        value_T: float [T], or 0-dim if it is a sum over the entries; detached.
        slope_T: float [T], detached.

    Returns:
        A tensor of the shape of `value_T`.
    """
    from megarl.algorithms.attached import Attached  # imported here: the class needs torch, and configurations are read without it

    return Attached.apply(logp_T, value_T, slope_T)


def token_weights(count_N: Tensor, aggregation: Aggregation, horizon: int | None = None, sequence_count: SequenceCount = None) -> Tensor:
    """The weight of each loss token in a sequence, such that the batch's loss is sum_T weight * loss.

    | aggregation             | weight of a token of sequence i |
    | token-mean              | 1 / sum_j count_j               |
    | seq-mean-token-mean     | 1 / (B count_i)                 |
    | seq-mean-token-sum      | 1 / B                           |
    | seq-mean-token-sum-norm | 1 / (B horizon)                 |

    B counts the sequences with at least one loss token; for seq-mean-token-sum-norm, whose denominator is a constant (Dr.GRPO), all
    sequences, including filtered ones. `sequence_count` chooses otherwise.

    Args:
        count_N: int [N], the loss tokens of every sequence of the GLOBAL mini-batch.
        aggregation: a row of the table.
        horizon: the maximum response length; needed only by seq-mean-token-sum-norm.
        sequence_count: what B is: the number of sequences with a loss token, of all sequences, or 1; None: as above.

    Returns:
        float64 [N]; sequences without loss tokens get 0.

    Raises:
        ValueError: no sequence has a loss token, or the horizon is missing.
    """
    used_N = count_N > 0
    if not used_N.any():
        raise ValueError(f"no loss token in {len(count_N)} sequences")
    count = count_N.double()
    counted = sequence_count or ("all" if aggregation == "seq-mean-token-sum-norm" else "trained")
    sequences = {"trained": int(used_N.sum()), "all": len(count_N), "one": 1}[counted]
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


def log_ratio(logp_T: Tensor, old_T: Tensor, batch: Batch) -> Tensor:
    """d_t = lp_t - old_t at loss tokens; value and gradient 0 elsewhere.

    Args:
        logp_T: float [T], log-probs under the current weights.
        old_T: float [T], log-probs under the weights that sampled, or that the step started from; not read at masked entries.
        batch: the entries; its mask marks the loss tokens.
    """
    return torch.where(batch.mask_T, logp_T - old_T, 0.0)


def bounded_exp(d_T: Tensor, bound: float) -> Tensor:
    """r = exp(d), with d clamped to +-bound; in a new tensor."""
    return d_T.clamp(-bound, bound).exp_()


def bounded_ratio(d_T: Tensor, bound: float) -> Term:
    """`bounded_exp` with its slope, which is r again and 0 beyond the bound; in new tensors."""
    ratio_T = bounded_exp(d_T, bound)
    return Term(ratio_T, ratio_T.masked_fill(d_T.abs() > bound, 0.0))


def surrogate(ratio: Term, advantage_T: Tensor) -> Term:
    """The surrogate without a clip, -r A, to be minimised, and its slope. `ratio`, r with its slope, is overwritten."""
    return Term(ratio.value_T.mul_(advantage_T).neg_(), ratio.slope_T.mul_(advantage_T).neg_())


def clipped_surrogate(ratio: Term, advantage_T: Tensor, low: float, high: float, dual: float | None = None) -> Term:
    """PPO's pessimistic surrogate (arXiv:1707.06347, eq. 7), to be minimised: max(-r A, -clip(r, 1 - low, 1 + high) A).

    Args:
        ratio: r, the token's or its sequence's ratio, with its slope; 1 at masked entries. Overwritten.
        advantage_T: float [T], A.
        low: the ratio is clipped below at 1 - low.
        high: the ratio is clipped above at 1 + high.
        dual: c > 1, which limits the loss of a token with A < 0 to at most -c A (arXiv:1912.09729, eq. 4); None: no such limit.

    Returns:
        Value and slope [T]; the slope is -A times the ratio's, and 0 where a clip applies. The counts are numbers of clipped tokens: all,
        those with A > 0 (high), the others (low), and with `dual` those at its limit (lower).
    """
    gain_T = -advantage_T
    plain_T = ratio.value_T * gain_T
    value_T = ratio.value_T.clamp_(1 - low, 1 + high).mul_(gain_T)
    slope_T = ratio.slope_T.mul_(gain_T)
    clips_T = value_T > plain_T
    torch.maximum(value_T, plain_T, out=value_T)
    slope_T.masked_fill_(clips_T, 0.0)
    total, upper = clips_T.count_nonzero(), (clips_T & (advantage_T > 0)).count_nonzero()
    counts = {"actor/pg_clipfrac": total, "actor/pg_clipfrac_high": upper, "actor/pg_clipfrac_low": total - upper}
    if dual is not None:
        ceiling_T = gain_T.mul_(dual)
        cut_T = (value_T > ceiling_T) & (advantage_T < 0)
        torch.where(cut_T, ceiling_T, value_T, out=value_T)
        slope_T.masked_fill_(cut_T, 0.0)
        counts["actor/pg_clipfrac_lower"] = cut_T.count_nonzero()
    return Term(value_T, slope_T, counts, clips_T)
