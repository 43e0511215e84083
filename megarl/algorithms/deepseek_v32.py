"""GRPO as in DeepSeek-V3.2: off-policy sequences are masked, and the KL is unbiased (arXiv:2512.02556, section 3.1)."""

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation


class DeepSeekV32(Clipped, GroupRelative):
    """GRPO's loss, 0 in a sequence with A_i < 0 and mean_t(roll_t - lp_t) > `off_policy_delta`, plus kl_coef * (pi / old) * k3.

    The paper gives no delta; 0.5 is TRL's advice. Its `kl_coef` depends on the domain and may be 0.
    """

    type: Literal["deepseek_v32"] = "deepseek_v32"
    aggregation: Aggregation = "seq-mean-token-mean"

    off_policy_delta: NonNegativeFloat | None = 0.5
    """Mask a sequence with a negative advantage whose mean log-prob has fallen by more than this since the rollout; null: none."""
    kl_importance_weighted: bool = True
    """Multiply the KL's estimator by the ratio to the old policy, with the gradient through both."""
