"""GSPO and GSPO-token: one importance ratio for a whole sequence (Zheng et al., arXiv:2507.18071)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.base import Fraction
from megarl.algorithms.clipped import DualClip
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, Term, bounded_ratio, clipped_surrogate
from megarl.lazy_torch import Tensor


class SequenceClipped(GroupRelative):
    """s_i = exp((1/|o_i|) sum_t d_{i,t}); loss = (1/B) sum_i max(-s_i A_i, -clip(s_i, 1-low, 1+high) A_i).

    Written per token: every token of a sequence carries the sequence's loss, and the gradient of the ratio s_i * exp(lp_t - sg(lp_t)),
    whose mean over the tokens is the gradient of s_i. That is the paper's GSPO-token (eq. 14), which also takes an advantage per token;
    with one advantage per sequence the two are equal, so both names lead here. No gradient crosses ranks, and context parallelism may
    split a sequence: `mean_T` comes from `PolicyAlgorithm._sequence_means`, with one sum over the context-parallel ranks. A token's
    correction weight scales that token's share of value and gradient.
    """

    clip_low: Fraction = 3e-4
    """The sequence's ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """The sequence's ratio is clipped above at 1 + clip_high."""
    dual_clip: DualClip = None

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor:
        return d_T

    def policy_term(self, block: Block) -> Term:
        assert block.mean_T is not None
        ratio = bounded_ratio(block.mean_T, self.ratio_bound)
        return clipped_surrogate(ratio, block.advantage_T, self.clip_low, self.clip_high, self.dual_clip)


class Gspo(SequenceClipped):
    """loss = (1/B) sum_i max(-s_i A_i, -clip(s_i, 1-low, 1+high) A_i) with s_i = exp((1/|o_i|) sum_t d_{i,t})."""

    type: Literal["gspo", "gspo_token"] = "gspo"
    aggregation: Aggregation = "seq-mean-token-mean"
