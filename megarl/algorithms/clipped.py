"""PPO's clipped surrogate as the policy term of the algorithms that share it (Schulman et al., arXiv:1707.06347)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megarl.algorithms.base import Fraction, NonNegative, PolicyAlgorithm
from megarl.algorithms.ops import Block, Term, clipped_surrogate


class Clipped(PolicyAlgorithm):
    """loss_t = max(-r_t A_t, -clip(r_t, 1 - low, 1 + high) A_t); at most -c A_t where A_t < 0 and `dual_clip` c is given."""

    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # a bound of 1 or less would cut tokens that have not moved

    def policy_term(self, block: Block) -> Term:
        return clipped_surrogate(block.d_T.exp(), block.advantage_T, self.clip_low, self.clip_high, self.dual_clip)
