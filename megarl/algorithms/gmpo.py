"""GMPO: the geometric mean of the clipped token ratios (Zhao et al., arXiv:2507.20673)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, Term, bounded_ratio, surrogate
from megarl.lazy_torch import Tensor


class Gmpo(GroupRelative):
    """ratio_i = exp(mean_t clip(d_t)), d_t at most +high where A > 0 and at least -low where A < 0; loss = (1/B) sum_i -A_i ratio_i.

    Written per token: every token carries its sequence's loss; its slope is the loss itself if the token's d is not clipped (the 1/|o_i|
    of the mean is the token's weight), else 0.
    """

    type: Literal["gmpo"] = "gmpo"
    aggregation: Aggregation = "seq-mean-token-mean"

    clip_low: NonNegativeFloat = 0.4
    """Where the advantage is negative, the log ratio is clipped below at -clip_low."""
    clip_high: NonNegativeFloat = 0.4
    """Where the advantage is positive, the log ratio is clipped above at clip_high."""

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor:
        high_T, low_T = self._clips(d_T, advantage_T)
        return d_T.masked_fill(high_T, self.clip_high).masked_fill_(low_T, -self.clip_low)

    def policy_term(self, block: Block) -> Term:
        assert block.mean_T is not None
        high_T, low_T = self._clips(block.d_T, block.advantage_T)
        loss = surrogate(bounded_ratio(block.mean_T, self.ratio_bound), block.advantage_T)
        high, low = high_T.count_nonzero(), low_T.count_nonzero()
        counts = {"actor/pg_clipfrac": high + low, "actor/pg_clipfrac_high": high, "actor/pg_clipfrac_low": low}
        outside_T = ((block.d_T > self.clip_high) | (block.d_T < -self.clip_low)) & block.mask_T
        for side, sign_T in (("positive", block.advantage_T > 0), ("negative", block.advantage_T < 0)):
            counts[f"actor/outside_{side}"] = (outside_T & sign_T).count_nonzero()
        return Term(loss.value_T, loss.slope_T.masked_fill_(high_T | low_T, 0.0), counts)

    def _clips(self, d_T: Tensor, advantage_T: Tensor) -> tuple[Tensor, Tensor]:
        return (d_T > self.clip_high) & (advantage_T > 0), (d_T < -self.clip_low) & (advantage_T < 0)
