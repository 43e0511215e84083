"""VAPO: value-based PPO for long chains of thought (Yue et al., arXiv:2504.05118)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from megarl.algorithms.base import Fraction, Loss
from megarl.algorithms.gae import length_adaptive_lambda
from megarl.algorithms.ops import Aggregation, Average, SumOver, attach
from megarl.algorithms.ppo import ActorCritic
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch


class Vapo(ActorCritic):
    """VC-PPO with lambda_policy = 1 - 1 / (alpha l) by response length l, Clip-Higher, token mean, and mu * NLL of correct responses.

    Each part can be turned off (the paper's ablations): `alpha: null` uses one `lambda_policy` for all lengths, `lambda_critic: null` uses
    the policy's lambda for the critic too, `clip_high: 0.2` clips equally on both sides, `aggregation: seq-mean-token-mean` weights
    responses equally instead of tokens, and `mu: 0` drops the NLL. Value pretraining and the group size are `critic.pretrain_steps` and
    `rollout.samples_per_prompt`.

    The NLL is divided by the tokens of correct responses (reward above `positive_above`) in the GLOBAL mini-batch. Its weights come from
    the driver (`positive_weights`), as `batch.extra_T["positive_weight"]`; they are 0 if no response of the mini-batch is correct.
    """

    type: Literal["vapo"] = "vapo"
    aggregation: Aggregation = "token-mean"

    clip_high: NonNegativeFloat = 0.28
    """The ratio is clipped above at 1 + clip_high (Clip-Higher)."""
    alpha: PositiveFloat | None = 0.05
    """Length-adaptive GAE: lambda_policy = 1 - 1 / (alpha l) for a response of l tokens; null: the same lambda_policy for all."""
    lambda_floor: Fraction | None = 0.0
    """Smallest length-adaptive lambda; null: the formula's own, below 0 for a response shorter than 1 / alpha."""
    lambda_policy: Fraction = 0.95
    """Lambda of the policy's advantages; used only if `alpha` is null."""
    lambda_critic: Fraction | None = 1.0
    """Lambda of the critic's targets; null: the policy's lambda."""
    mu: NonNegativeFloat = 0.1
    """Weight of the NLL of correct responses."""
    positive_above: float = 0.0
    """Responses with a reward above this count as correct."""

    def policy_lambda(self, batch: Batch) -> float | Tensor:
        return self.lambda_policy if self.alpha is None else length_adaptive_lambda(batch.count_N, self.alpha, self.lambda_floor)

    def critic_lambda(self, batch: Batch) -> float | Tensor:
        return self.policy_lambda(batch) if self.lambda_critic is None else self.lambda_critic

    def positive_weights(self, count_N: Tensor, reward_N: Tensor) -> Tensor | None:
        """mu / (loss tokens of all correct responses) for correct responses, else 0; None if mu is 0."""
        if self.mu == 0:
            return None
        positive_N = (reward_N > self.positive_above) & (count_N > 0)
        return positive_N.double() * (self.mu / max(int(count_N[positive_N].sum()), 1))

    def loss(self, logp_T: Tensor, entropy_T: Tensor, batch: Batch, sum_over: SumOver, kl_coef: float) -> Loss:
        loss = super().loss(logp_T, entropy_T, batch, sum_over, kl_coef)
        if "positive_weight" not in batch.extra_T:
            return loss
        weight_T = batch.extra_T["positive_weight"]
        nll = torch.where(weight_T > 0, logp_T.detach(), 0.0).sum().neg()
        mean = {**loss.mean, "actor/positive_nll": Average(nll, (weight_T > 0).count_nonzero())}
        # The term's value is one number and its slope is the weights themselves, so that no other per-token tensor is kept.
        weighted_lp = torch.where(batch.mask_T, logp_T.detach(), 0.0).mul_(weight_T).sum()
        return replace(loss, weighted=-attach(logp_T, weighted_lp, weight_T), mean=mean)
