"""GSPO and GSPO-token: one importance ratio for a whole sequence (Zheng et al., arXiv:2507.18071)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from megarl.algorithms.base import Fraction, NonNegative, PolicyAlgorithm
from megarl.algorithms.ops import Aggregation, SumOver, Term, clipped_surrogate, group_normalised, sequence_mean
from megarl.batch import Batch


class Gspo(PolicyAlgorithm):
    """s_i = exp((1/|o_i|) sum_t d_{i,t}); loss = (1/B) sum_i max(-s_i A_i, -clip(s_i, 1-low, 1+high) A_i).

    Written per token: every token of a sequence carries the sequence's loss, and the gradient of the ratio s_i * exp(lp_t - sg(lp_t)),
    whose mean over the tokens is the gradient of s_i. That is the paper's GSPO-token (eq. 14), which also takes an advantage per token;
    with one advantage per sequence the two are equal, so both names lead here. No gradient crosses ranks, and a sequence may be cut by
    context parallelism.
    """

    type: Literal["gspo", "gspo_token"] = "gspo"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    min_group: ClassVar[int] = 2

    clip_low: Fraction = 3e-4
    clip_high: NonNegative = 4e-4

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return group_normalised(reward_N, group_N)

    def policy_term(self, lp_T: Tensor, d_T: Tensor, batch: Batch, sum_over: SumOver) -> Term:
        ratio_N = sequence_mean(d_T, batch, sum_over).exp_()
        ratio_T = batch.spread(ratio_N).masked_fill_(~batch.mask_T, 1.0)
        return clipped_surrogate(ratio_T, batch.extra_T["advantage"], self.clip_low, self.clip_high)
