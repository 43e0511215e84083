"""GRPO: group-relative advantages, PPO's clipped loss, sequence means (Shao et al., arXiv:2402.03300)."""

from typing import Literal

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation


class Grpo(Clipped, GroupRelative):
    """A_i = (R_i - mean_group) / (std_group + 1e-6); loss = (1/B) sum_i (1/|o_i|) sum_t max(-r A, -clip(r, 1-low, 1+high) A)."""

    type: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "seq-mean-token-mean"
