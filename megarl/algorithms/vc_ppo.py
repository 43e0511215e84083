"""VC-PPO: PPO for long chains of thought; lambda decoupled, the critic pretrained (Yuan et al., arXiv:2503.01491)."""

from __future__ import annotations

from typing import Literal

from megarl.algorithms.base import Fraction
from megarl.algorithms.ops import Aggregation
from megarl.algorithms.ppo import ActorCritic
from megarl.batch import Batch
from megarl.lazy_torch import Tensor


class VcPpo(ActorCritic):
    """The policy's advantages with lambda 0.95 (less variance), the critic's targets with lambda 1 (no bias: the return)."""

    type: Literal["vc_ppo"] = "vc_ppo"
    aggregation: Aggregation = "seq-mean-token-mean"

    lambda_policy: Fraction = 0.95
    """Lambda of the policy's advantages."""
    lambda_critic: Fraction = 1.0
    """Lambda of the critic's targets."""

    def policy_lambda(self, batch: Batch) -> float | Tensor:
        return self.lambda_policy

    def critic_lambda(self, batch: Batch) -> float:
        return self.lambda_critic
