"""PPO's clipped surrogate as the policy term of the algorithms that share it (Schulman et al., arXiv:1707.06347)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from megarl.algorithms.base import Fraction, PolicyAlgorithm
from megarl.algorithms.ops import Block, Term, bounded_ratio, clipped_surrogate
from megarl.lazy_torch import Tensor

DualClip = Annotated[
    Annotated[float, Field(gt=1)] | None,
    Field(
        description="Dual clip: maximum loss of a token with negative advantage, in units of |A|; 1 or less would clip tokens whose "
        "ratio is 1. null: no dual clip."
    ),
]


class Clipped(PolicyAlgorithm):
    """loss_t = max(-r_t A_t, -clip(r_t, 1 - low, 1 + high) A_t); at most -c A_t where A_t < 0 and `dual_clip` c is given.

    With `off_policy_delta` it is 0 in a sequence with A < 0 and mean_t(roll_t - lp_t) > delta, roll being the rollout policy's log-prob
    (DeepSeek-V3.2, arXiv:2512.02556). The mask is detached; KL and entropy terms and all denominators are as without it.
    """

    sequence_from: ClassVar[Literal["old_logp", "rollout_logp"]] = "rollout_logp"

    clip_low: Fraction = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: DualClip = None
    off_policy_delta: NonNegativeFloat | None = None
    """Mask a sequence with a negative advantage whose mean log-prob has fallen by more than this since the rollout; null: none."""

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor | None:
        return None if self.off_policy_delta is None else d_T

    @property
    def joins_tokens(self) -> bool:
        return self.off_policy_delta is not None

    def policy_term(self, block: Block) -> Term:
        ratio = bounded_ratio(block.d_T, self.ratio_bound)
        term = clipped_surrogate(ratio, block.advantage_T, self.clip_low, self.clip_high, self.dual_clip)
        if self.off_policy_delta is None:
            return term
        assert block.mean_T is not None
        off_T = (block.advantage_T < 0) & (block.mean_T < -self.off_policy_delta)
        counts = {**term.counts, "actor/off_policy_masked": (off_T & block.mask_T).count_nonzero()}
        return Term(term.value_T.masked_fill_(off_T, 0.0), term.slope_T.masked_fill_(off_T, 0.0), counts)
