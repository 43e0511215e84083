"""PPO's clipped surrogate as the policy term of the algorithms that share it (Schulman et al., arXiv:1707.06347)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from megarl.algorithms.base import Fraction, PolicyAlgorithm
from megarl.algorithms.ops import Block, Term, clipped_surrogate


class Clipped(PolicyAlgorithm):
    """loss_t = max(-r_t A_t, -clip(r_t, 1 - low, 1 + high) A_t); at most -c A_t where A_t < 0 and `dual_clip` c is given."""

    clip_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: largest loss of a token with negative advantage, in units of |A|; 1 or less would cut tokens that have not moved."""

    def policy_term(self, block: Block) -> Term:
        return clipped_surrogate(block.d_T.exp(), block.advantage_T, self.clip_low, self.clip_high, self.dual_clip)
