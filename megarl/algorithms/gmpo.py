"""GMPO: the geometric mean of the clipped token ratios (Zhao et al., arXiv:2507.20673)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat
from torch import Tensor

from megarl.algorithms.base import PolicyAlgorithm
from megarl.algorithms.ops import Aggregation, Block, Term, group_normalised


class Gmpo(PolicyAlgorithm):
    """ratio_i = exp(mean_t clip(d_t)), d_t at most +high where A > 0 and at least -low where A < 0; loss = (1/B) sum_i -A_i ratio_i.

    Written per token: every token carries its sequence's loss; the slope is the loss itself where the token's d is not clipped (the
    mean's 1/|o_i| is the token's weight), else 0.
    """

    type: Literal["gmpo"] = "gmpo"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    min_group: ClassVar[int] = 2

    clip_low: NonNegativeFloat = 0.4
    """Where the advantage is negative, the log ratio is clipped below at -clip_low."""
    clip_high: NonNegativeFloat = 0.4
    """Where the advantage is positive, the log ratio is clipped above at clip_high."""

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return group_normalised(reward_N, group_N)

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor:
        high_T, low_T = self._clips(d_T, advantage_T)
        return d_T.masked_fill(high_T, self.clip_high).masked_fill_(low_T, -self.clip_low)

    def policy_term(self, block: Block) -> Term:
        assert block.mean_T is not None
        high_T, low_T = self._clips(block.d_T, block.advantage_T)
        value_T = block.mean_T.exp().mul_(block.advantage_T).neg_()
        high, low = high_T.count_nonzero(), low_T.count_nonzero()
        counts = {"actor/pg_clipfrac": high + low, "actor/pg_clipfrac_high": high, "actor/pg_clipfrac_low": low}
        return Term(value_T, value_T.masked_fill(high_T | low_T, 0.0), counts)

    def _clips(self, d_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor]:
        return (d_T > self.clip_high) & (advantage_T > 0), (d_T < -self.clip_low) & (advantage_T < 0)
