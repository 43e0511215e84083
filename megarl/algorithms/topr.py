"""TOPR: good responses are imitated, bad ones forgotten only as far as they are still likely (Le Roux et al., arXiv:2503.14286)."""

from __future__ import annotations

from typing import ClassVar, Literal

from megarl.algorithms.base import PolicyAlgorithm
from megarl.algorithms.ops import Aggregation, Block, Term
from megarl.lazy_torch import Tensor, torch


class Topr(PolicyAlgorithm):
    """A_i = R_i - baseline; loss = (1/B) sum_i -sg(w_i) A_i sum_t lp_t: w_i = 1 where A_i >= 0, else min(1, exp(sum_t (lp_t - roll_t))).

    The paper's rewards are 1 and -1; rewards of 1 and 0 need a baseline, or nothing would be negative.
    """

    type: Literal["topr"] = "topr"
    aggregation: Aggregation = "seq-mean-token-sum"
    sequence_from: ClassVar[Literal["old_logp", "rollout_logp"]] = "rollout_logp"

    baseline: float = 0.0
    """A constant that is subtracted from the reward."""

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return (reward_N.double() - self.baseline).float()

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor:
        return d_T

    def policy_term(self, block: Block) -> Term:
        assert block.mean_T is not None
        level_T = (block.mean_T * block.count_T).clamp_(-self.ratio_bound, 0)
        weight_T = level_T.masked_fill_(block.advantage_T >= 0, 0.0).exp_()
        counts = {"actor/sequence_weight": torch.where(block.mask_T, weight_T, 0.0).sum()}
        slope_T = weight_T.mul_(block.advantage_T).neg_()
        return Term(slope_T * block.lp_T, slope_T, counts)
