"""REINFORCE: the plain policy gradient, on rewards to go (Williams, 1992)."""

from __future__ import annotations

from typing import Literal

from megarl.algorithms.base import Fraction, PolicyAlgorithm
from megarl.algorithms.gae import discounted_to_go
from megarl.algorithms.ops import Aggregation, Block, SumOver, Term, bounded_exp
from megarl.batch import Batch
from megarl.lazy_torch import Tensor


class PolicyGradient(PolicyAlgorithm):
    """loss_t = -sg(r_t) A_t lp_t: r = 1 on-policy; the importance weight keeps the gradient right in later mini-batches of a step."""

    aggregation: Aggregation = "seq-mean-token-sum"

    kl_in: Literal["loss", "reward"] = "reward"
    """Whether the KL is a term of the loss or subtracted from the reward."""

    def policy_term(self, block: Block) -> Term:
        slope_T = bounded_exp(block.d_T, self.ratio_bound).mul_(block.advantage_T).neg_()
        return Term(slope_T * block.lp_T, slope_T)


class Reinforce(PolicyGradient):
    """A_t = sum_{k >= t} gamma^(k-t) r_k - b, with r_k the token rewards (a KL in the reward is at every token).

    b is the mean reward of the step's responses, or 0.
    """

    type: Literal["reinforce"] = "reinforce"

    gamma: Fraction = 1.0
    """Discount of a reward per token."""
    baseline: Literal["batch_mean", "none"] = "batch_mean"
    """Subtracted from the reward: the mean reward of the step, or nothing."""

    @property
    def kl_per_sequence(self) -> bool:
        return False

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        baseline = reward_N.double().mean() if self.baseline == "batch_mean" else 0.0
        return (reward_N.double() - baseline).float()

    def token_advantages(self, batch: Batch, sum_over: SumOver, kl_coef: float) -> Tensor:
        baseline_T = batch.extra_T["reward"] - batch.extra_T["advantage"]
        return discounted_to_go(self.token_rewards(batch, kl_coef), batch, self.gamma) - baseline_T
