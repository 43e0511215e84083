"""SPO, Simple Policy Optimization: the ratio is drawn towards 1 by a parabola instead of a clip (Xie et al., arXiv:2401.16025)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block
from megarl.lazy_torch import Tensor


class Spo(GroupRelative):
    """loss_t = |A_t| (r_t - 1)^2 / (2 eps) - r_t A_t, which is least where r_t = 1 + eps sign(A_t)."""

    type: Literal["spo"] = "spo"
    aggregation: Aggregation = "seq-mean-token-mean"

    eps: PositiveFloat = 0.2
    """How far from 1 the ratio is drawn."""

    def policy_loss(self, block: Block) -> Tensor:
        ratio_T = block.d_T.exp()
        return block.advantage_T.abs() * (ratio_T - 1).square() / (2 * self.eps) - ratio_T * block.advantage_T
