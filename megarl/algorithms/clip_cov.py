"""Clip-Cov: a few of the tokens that lower the entropy most have no gradient (Cui et al., arXiv:2505.22617)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from megarl.algorithms.base import Fraction
from megarl.algorithms.clipped import Clipped
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, SumOver, Term
from megarl.algorithms.selection import covariances, smallest
from megarl.batch import Batch
from megarl.lazy_torch import Tensor


class ClipCov(Clipped, GroupRelative):
    """PPO's loss, 0 for floor(r N) tokens drawn from those whose covariance is between `cov_low` and `cov_high`, of N in the mini-batch.

    A token's covariance is (log pi - mean log pi)(A - mean A), over the mini-batch, at the weights that the update starts from.
    """

    type: Literal["clip_cov"] = "clip_cov"
    aggregation: Aggregation = "token-mean"
    selects: ClassVar[bool] = True

    cov_ratio: Fraction = 2e-4
    """r, the share of the mini-batch's loss tokens that are drawn, if there are so many between the bounds."""
    cov_low: float = 1.0
    """Covariance above which a token may be drawn."""
    cov_high: float = 5.0
    """Covariance below which a token may be drawn."""

    @model_validator(mode="after")
    def _has_a_range(self) -> ClipCov:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low={self.cov_low:g}: must be below cov_high={self.cov_high:g}")
        return self

    def selection(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        covariance_T, tokens = covariances(logp_T, batch.extra_T["advantage"], batch.mask_T, sum_over)
        between_T = batch.mask_T & (covariance_T > self.cov_low) & (covariance_T < self.cov_high)
        lot_T = batch.extra_T["lot"]
        return smallest(lot_T, lot_T, between_T, int(self.cov_ratio * tokens), sum_over)

    def policy_term(self, block: Block) -> Term:
        assert block.chosen_T is not None
        term = super().policy_term(block)
        counts = {**term.counts, "actor/selected": (block.chosen_T & block.mask_T).count_nonzero()}
        return Term(term.value_T.masked_fill_(block.chosen_T, 0.0), term.slope_T.masked_fill_(block.chosen_T, 0.0), counts)
