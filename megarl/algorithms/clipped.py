"""PPO's clipped surrogate as the policy term of the algorithms that share it (Schulman et al., arXiv:1707.06347)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from megarl.algorithms.base import Fraction, PolicyAlgorithm
from megarl.algorithms.ops import Block, Term, bounded_ratio, clipped_surrogate

DualClip = Annotated[
    Annotated[float, Field(gt=1)] | None,
    Field(
        description="Dual clip: maximum loss of a token with negative advantage, in units of |A|; 1 or less would clip tokens whose "
        "ratio is 1. null: no dual clip."
    ),
]


class Clipped(PolicyAlgorithm):
    """loss_t = max(-r_t A_t, -clip(r_t, 1 - low, 1 + high) A_t); at most -c A_t where A_t < 0 and `dual_clip` c is given."""

    clip_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: DualClip = None

    def policy_term(self, block: Block) -> Term:
        ratio = bounded_ratio(block.d_T, self.ratio_bound)
        return clipped_surrogate(ratio, block.advantage_T, self.clip_low, self.clip_high, self.dual_clip)
