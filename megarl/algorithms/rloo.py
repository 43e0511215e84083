"""RLOO: the plain policy gradient with the other responses to the prompt as baseline (Ahmadian et al., arXiv:2402.14740)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from megarl.algorithms.ops import leave_one_out
from megarl.algorithms.reinforce import PolicyGradient


class Rloo(PolicyGradient):
    """A_i = R_i - mean of the other G - 1 rewards; loss = (1/B) sum_i sum_t -sg(r_t) A_i lp_t."""

    type: Literal["rloo"] = "rloo"
    min_group: ClassVar[int] = 2

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return leave_one_out(reward_N, group_N).float()
