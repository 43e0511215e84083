"""DAPO: GRPO's advantages, Clip-Higher, the mean over all tokens (Yu et al., arXiv:2503.14476).

Its dynamic sampling and overlong penalty select and score responses; they are not part of the loss.
"""

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation


class Dapo(Clipped, GroupRelative):
    """A_i as GRPO's; loss = (1 / sum_i |o_i|) sum_i sum_t max(-r A, -clip(r, 1 - 0.2, 1 + 0.28) A)."""

    type: Literal["dapo"] = "dapo"
    aggregation: Aggregation = "token-mean"

    clip_high: NonNegativeFloat = 0.28
    """The ratio is clipped above at 1 + clip_high (Clip-Higher)."""
