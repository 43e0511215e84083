"""DPO and cDPO: preferences without a reward model (Rafailov et al., arXiv:2305.18290; label smoothing: Mitchell, 2023)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.algorithms.pairs import PairLoss, Side
from megarl.lazy_torch import F, Tensor


class Dpo(PairLoss):
    """z = beta ((lp_c - ref_c) - (lp_r - ref_r)), summed over tokens; loss = mean of -(1-e) log sigmoid(z) - e log sigmoid(-z)."""

    type: Literal["dpo"] = "dpo"

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the implicit KL to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of labels assumed to be wrong (cDPO)."""

    average: bool = False
    """Take the mean over a response's tokens instead of their sum."""

    def reward(self, side: Side) -> Tensor:
        return self.beta * (side.shift_P / side.count_P if self.average else side.shift_P)

    def pair_loss(self, chosen: Side, rejected: Side) -> Tensor:
        z_P = self.reward(chosen) - self.reward(rejected)
        return -(1 - self.label_smoothing) * F.logsigmoid(z_P) - self.label_smoothing * F.logsigmoid(-z_P)
