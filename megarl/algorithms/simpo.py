"""SimPO: preferences without a reference (Meng et al., arXiv:2405.14734, eq. 6)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megarl.algorithms.pairs import PairLoss, Side
from megarl.lazy_torch import F, Tensor


class SimPo(PairLoss):
    """r = beta / |o| sum_t lp_t; loss = mean of -log sigmoid(r_c - r_r - gamma)."""

    type: Literal["simpo"] = "simpo"
    needs_reference: ClassVar[bool] = False

    beta: Annotated[float, Field(gt=0)] = 2.0
    """Scale of the reward."""
    gamma: Annotated[float, Field(ge=0)] = 1.0
    """Target margin between the chosen and the rejected response's rewards."""

    def reward(self, side: Side) -> Tensor:
        return self.beta * side.logp_P / side.count_P

    def pair_loss(self, chosen: Side, rejected: Side) -> Tensor:
        return -F.logsigmoid(self.reward(chosen) - self.reward(rejected) - self.gamma)
