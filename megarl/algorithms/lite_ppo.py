"""LitePPO: the group's mean, the batch's std, PPO's clipped loss, the mean over all tokens (Liu et al., arXiv:2508.08221)."""

from typing import Literal

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.groups import GroupRelative, Scale
from megarl.algorithms.ops import Aggregation


class LitePpo(Clipped, GroupRelative):
    """A_i = (R_i - mean_group) / (std of the raw rewards of the whole batch + 1e-6)."""

    type: Literal["lite_ppo"] = "lite_ppo"
    aggregation: Aggregation = "token-mean"

    scale: Scale = "batch"
