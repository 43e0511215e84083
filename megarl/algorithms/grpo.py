"""GRPO: group-relative advantages, PPO's clipped loss, sequence means (Shao et al., arXiv:2402.03300)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.ops import Aggregation, group_normalised


class Grpo(Clipped):
    """A_i = (R_i - mean_group) / (std_group + 1e-6); loss = (1/B) sum_i (1/|o_i|) sum_t max(-r A, -clip(r, 1-low, 1+high) A)."""

    type: Literal["grpo"] = "grpo"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-mean"
    min_group: ClassVar[int] = 2

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return group_normalised(reward_N, group_N)
