"""CISPO: the importance weight is clipped, not the token: every token keeps its gradient (MiniMax-M1, arXiv:2506.13585)."""

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.base import Fraction
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, Term, bounded_exp


class Cispo(GroupRelative):
    """loss = (1 / sum_i |o_i|) sum_i sum_t -sg(clip(r_t, 1 - low, 1 + high)) A_i lp_t. low = 1: no lower bound."""

    type: Literal["cispo"] = "cispo"
    aggregation: Aggregation = "token-mean"

    clip_low: Fraction = 1.0
    """The weight is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 4.0
    """The weight is clipped above at 1 + clip_high."""

    def policy_term(self, block: Block) -> Term:
        ratio_T = bounded_exp(block.d_T, self.ratio_bound)
        high, low = (ratio_T > 1 + self.clip_high).count_nonzero(), (ratio_T < 1 - self.clip_low).count_nonzero()
        upward = ((ratio_T > 1 + self.clip_high) & (block.advantage_T > 0)).count_nonzero()
        slope_T = ratio_T.clamp_(1 - self.clip_low, 1 + self.clip_high).mul_(block.advantage_T).neg_()
        counts = {"actor/pg_clipfrac": high + low, "actor/pg_clipfrac_high": high, "actor/pg_clipfrac_low": low}
        counts["actor/pg_clipfrac_high_positive"] = upward
        return Term(slope_T * block.lp_T, slope_T, counts)
