"""VESPO: a smooth weight on the whole response's importance ratio (arXiv:2602.10693)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, Term
from megarl.lazy_torch import Tensor, torch


class Vespo(GroupRelative):
    """loss = (1/B) sum_i -sg(phi(W_i)) A_i sum_t lp_t, with phi(W) = W^k exp(lambda (1 - W)) and W_i = exp(sum_t (lp_t - roll_t)).

    W is the whole response's ratio to the rollout policy, without division by its length; phi(1) = 1. k and lambda are the positive ones
    where A >= 0. Log W is clamped to +-`ratio_bound`.
    """

    type: Literal["vespo"] = "vespo"
    aggregation: Aggregation = "seq-mean-token-sum"
    sequence_from: ClassVar[Literal["old_logp", "rollout_logp"]] = "rollout_logp"

    k_positive: NonNegativeFloat = 2.0
    """The power k where the advantage is not negative."""
    lambda_positive: NonNegativeFloat = 3.0
    """The decay lambda where the advantage is not negative."""
    k_negative: NonNegativeFloat = 3.0
    """The power k where the advantage is negative."""
    lambda_negative: NonNegativeFloat = 2.0
    """The decay lambda where the advantage is negative."""

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor:
        return d_T

    def policy_term(self, block: Block) -> Term:
        assert block.mean_T is not None
        level_T = (block.mean_T * block.count_T).clamp_(-self.ratio_bound, self.ratio_bound)
        negative_T = block.advantage_T < 0
        k_T = torch.full_like(level_T, self.k_positive).masked_fill_(negative_T, self.k_negative)
        lambda_T = torch.full_like(level_T, self.lambda_positive).masked_fill_(negative_T, self.lambda_negative)
        weight_T = (k_T * level_T - lambda_T * torch.expm1(level_T)).exp_()
        counts = {"actor/sequence_weight": torch.where(block.mask_T, weight_T, 0.0).sum()}
        slope_T = weight_T.mul_(block.advantage_T).neg_()
        return Term(slope_T * block.lp_T, slope_T, counts)
