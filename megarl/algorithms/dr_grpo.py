"""Dr.GRPO: GRPO without its two biases, the division by the group's std and by the response's length (Liu et al., arXiv:2503.20783)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.ops import Aggregation, group_centred, token_weights


class DrGrpo(Clipped):
    """A_i = R_i - mean_group; loss = (1 / (B L)) sum_i sum_t max(-r A, -clip(r, 1-low, 1+high) A) with the constant L = `horizon`."""

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: ClassVar[Aggregation] = "seq-mean-token-sum-norm"
    min_group: ClassVar[int] = 2

    horizon: Annotated[int, Field(ge=1)]
    """The constant that a sequence's loss is divided by: the maximum response length."""

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return group_centred(reward_N, group_N).float()

    def weights(self, count_N: Tensor) -> Tensor:
        return token_weights(count_N, self.aggregation, self.horizon)
