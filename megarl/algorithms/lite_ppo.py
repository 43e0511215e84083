"""LitePPO: the group's mean, the batch's std, PPO's clipped loss, the mean over all tokens (Liu et al., arXiv:2508.08221)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.ops import Aggregation, batch_normalised


class LitePpo(Clipped):
    """A_i = (R_i - mean_group) / (std of the raw rewards of the whole batch + 1e-6)."""

    type: Literal["lite_ppo"] = "lite_ppo"
    aggregation: ClassVar[Aggregation] = "token-mean"
    min_group: ClassVar[int] = 2

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return batch_normalised(reward_N, group_N).float()
