"""DAPO: GRPO's advantages, Clip-Higher, the mean over all tokens (Yu et al., arXiv:2503.14476).

Its dynamic sampling and its overlong punishment choose and score responses: they are no part of the loss.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat
from torch import Tensor

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.ops import Aggregation, group_normalised


class Dapo(Clipped):
    """A_i as GRPO's; loss = (1 / sum_i |o_i|) sum_i sum_t max(-r A, -clip(r, 1 - 0.2, 1 + 0.28) A)."""

    type: Literal["dapo"] = "dapo"
    aggregation: ClassVar[Aggregation] = "token-mean"
    min_group: ClassVar[int] = 2

    clip_high: NonNegativeFloat = 0.28
    """The ratio is clipped above at 1 + clip_high (Clip-Higher)."""

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return group_normalised(reward_N, group_N)
