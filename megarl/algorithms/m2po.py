"""M2PO: instead of a clip, a bound on the second moment of the log ratios of the tokens that leave the trust region (arXiv:2510.01161)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, SumOver, Term, bounded_ratio, log_ratio, surrogate
from megarl.algorithms.selection import keys, last_key
from megarl.batch import Batch
from megarl.lazy_torch import Tensor


class M2po(GroupRelative):
    """loss_t = -M_t r_t A_t with M_t = 0 for the fewest tokens that bring M2 of the others down to `m2_threshold`.

    M2 is the mean of (log r)^2 over the mini-batch's tokens that an update moves further away: A > 0 and r > 1, or A < 0 and r < 1. Of
    these, tokens with the largest (log r)^2 are masked, equal ones together; M_t = 1 elsewhere. r is to the policy that sampled: where
    responses are from older weights, `train.old_logp: rollout`.
    """

    type: Literal["m2po"] = "m2po"
    aggregation: Aggregation = "token-mean"
    selects: ClassVar[bool] = True

    m2_threshold: PositiveFloat = 0.04
    """tau, the largest mean square of the log ratios."""

    def selection(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        d_T = log_ratio(logp_T, batch.extra_T["old_logp"], batch).double()
        away_T = batch.mask_T & (d_T * batch.extra_T["advantage"] > 0)
        square_T = d_T.square()
        bound = last_key(keys(square_T[away_T]), square_T[away_T], lambda held, total: total <= self.m2_threshold * held, sum_over)
        return away_T & (keys(square_T) > bound)

    def policy_term(self, block: Block) -> Term:
        assert block.chosen_T is not None
        loss = surrogate(bounded_ratio(block.d_T, self.ratio_bound), block.advantage_T)
        masked = (block.chosen_T & block.mask_T).count_nonzero()
        counts = {"actor/pg_clipfrac": masked, "actor/selected": masked}
        return Term(loss.value_T.masked_fill_(block.chosen_T, 0.0), loss.slope_T.masked_fill_(block.chosen_T, 0.0), counts)
