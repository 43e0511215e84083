"""PPO with a critic, as in RLHF (Schulman et al., arXiv:1707.06347; Ouyang et al., arXiv:2203.02155)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PositiveFloat, model_validator

from megarl.algorithms.base import Fraction
from megarl.algorithms.clipped import Clipped
from megarl.algorithms.gae import Variance, gae, whiten
from megarl.algorithms.ops import Aggregation, SumOver
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch


class ActorCritic(Clipped):
    """Advantages and critic targets by GAE from the critic's values, `batch.extra_T["value"]`; a KL in the reward is at every token."""

    needs_critic: ClassVar[bool] = True

    kl_in: Literal["loss", "reward"] = "reward"
    """Whether the KL is a term of the loss or subtracted from the reward."""
    gamma: Fraction = 1.0
    """Discount of a reward per token."""
    whiten: bool = False
    """Whiten the advantages over all loss tokens of the step."""
    whiten_variance: Variance = "sample"
    masked_steps: Literal["skip", "zero"] = "skip"
    """GAE over masked tokens inside a response (an environment's): skip them, or count them as steps of reward 0 and value 0 (zero)."""
    value_clip: PositiveFloat | None = None
    """How far the critic's values may move in a step; null: no limit."""

    @model_validator(mode="after")
    def _whitens(self) -> ActorCritic:
        if not self.whiten and self.whiten_variance != "sample":
            raise ValueError(f"whiten_variance={self.whiten_variance} with whiten=false: no variance is divided by; leave it out")
        return self

    @property
    def kl_per_sequence(self) -> bool:
        return False

    def policy_lambda(self, batch: Batch) -> float | Tensor:
        """GAE's lambda for the policy's advantages: one number, or one per sequence [N]."""
        raise NotImplementedError

    def critic_lambda(self, batch: Batch) -> float | Tensor:
        """GAE's lambda for the critic's targets: one number, or one per sequence [N]; 1 makes them Monte Carlo returns."""
        raise NotImplementedError

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        """The rewards themselves: the ranks compute the tokens' advantages from the values."""
        return reward_N.float()

    def token_advantages(self, batch: Batch, sum_over: SumOver, kl_coef: float) -> Tensor:
        advantage_T = self._gae(batch, kl_coef, self.policy_lambda(batch))
        return whiten(advantage_T, batch.mask_T, sum_over, self.whiten_variance) if self.whiten else advantage_T

    def returns(self, batch: Batch, kl_coef: float) -> Tensor:
        """The critic's targets, A^critic_lambda + V at each loss token [T], on the whole sequences of one rank."""
        return self._gae(batch, kl_coef, self.critic_lambda(batch)) + batch.extra_T["value"]

    def outcomes(self, batch: Batch, kl_coef: float) -> Tensor:
        """The discounted rewards to go (Monte Carlo) from each loss token [T], independent of the critic."""
        return self._gae(batch, kl_coef, 1.0) + batch.extra_T["value"]

    def _gae(self, batch: Batch, kl_coef: float, lam: float | Tensor) -> Tensor:
        reward_T, value_T = self.token_rewards(batch, kl_coef), batch.extra_T["value"]
        if self.masked_steps == "skip":
            return gae(reward_T, value_T, batch, self.gamma, lam, least=-math.inf)
        every = replace(batch, mask_T=torch.ones_like(batch.mask_T))
        advantage_T = gae(reward_T, torch.where(batch.mask_T, value_T, 0.0), every, self.gamma, lam, least=-math.inf)
        return torch.where(batch.mask_T, advantage_T, 0.0)


class Ppo(ActorCritic):
    """GAE(gamma 1, lambda 0.95) for advantages (whitened) and targets; loss = (1/B) sum_i (1/|o_i|) sum_t max(-r A, -clip(r) A)."""

    type: Literal["ppo"] = "ppo"
    aggregation: Aggregation = "seq-mean-token-mean"

    whiten: bool = True
    """Whiten the advantages over all loss tokens of the step."""
    value_clip: PositiveFloat | None = 0.2
    """How far the critic's values may move in a step; null: no limit."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""

    def policy_lambda(self, batch: Batch) -> float:
        return self.gae_lambda

    def critic_lambda(self, batch: Batch) -> float:
        return self.gae_lambda
