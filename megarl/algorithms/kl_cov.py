"""KL-Cov: the tokens that lower the entropy most are held back by a KL to the old policy (Cui et al., arXiv:2505.22617)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.base import Fraction
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, SumOver, Term, bounded_ratio, surrogate
from megarl.algorithms.selection import covariances, keys, smallest
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch


class KlCov(GroupRelative):
    """loss_t = -r_t A_t, plus beta |log r_t| for the floor(k N) tokens with the largest covariances of N in the mini-batch.

    Covariances are as in `ClipCov`. |log r| is the paper's estimate of KL(old || pi); its slope is the sign of log r, 0 where r = 1.
    """

    type: Literal["kl_cov"] = "kl_cov"
    aggregation: Aggregation = "token-mean"
    selects: ClassVar[bool] = True

    cov_ratio: Fraction = 2e-4
    """k, the share of the mini-batch's loss tokens that are held back."""
    cov_kl_coef: NonNegativeFloat = 1.0
    """beta, the weight of their KL to the old policy."""

    def selection(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        covariance_T, tokens = covariances(logp_T, batch.extra_T["advantage"], batch.mask_T, sum_over)
        return smallest(keys(-covariance_T), batch.extra_T["lot"], batch.mask_T, int(self.cov_ratio * tokens), sum_over)

    def policy_term(self, block: Block) -> Term:
        assert block.chosen_T is not None
        loss = surrogate(bounded_ratio(block.d_T, self.ratio_bound), block.advantage_T)
        d_T = block.d_T.clamp(-self.ratio_bound, self.ratio_bound)
        sign_T = d_T.sign().masked_fill_(block.d_T.abs() > self.ratio_bound, 0.0)
        value_T = loss.value_T.add_(torch.where(block.chosen_T, self.cov_kl_coef * d_T.abs(), 0.0))
        slope_T = loss.slope_T.add_(torch.where(block.chosen_T, self.cov_kl_coef * sign_T, 0.0))
        return Term(value_T, slope_T, {"actor/selected": (block.chosen_T & block.mask_T).count_nonzero()})
