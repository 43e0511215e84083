"""Dr.GRPO: GRPO without its two biases, the division by the group's std and by the response's length (Liu et al., arXiv:2503.20783)."""

from typing import Literal

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.groups import GroupRelative, Scale
from megarl.algorithms.ops import Aggregation


class DrGrpo(Clipped, GroupRelative):
    """A_i = R_i - mean_group; loss = (1 / (B L)) sum_i sum_t max(-r A, -clip(r, 1-low, 1+high) A) with the constant L = `horizon`.

    B counts all responses of the mini-batch, even those that an overlong filter leaves without a loss token: the paper's B is a constant.
    """

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "seq-mean-token-sum-norm"

    scale: Scale = "none"
