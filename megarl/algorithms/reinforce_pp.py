"""REINFORCE++ and REINFORCE++-baseline: token rewards, whitened over the global batch, PPO's clipped loss (Hu et al., arXiv:2501.03262)."""

from __future__ import annotations

from typing import Literal

from megarl.algorithms.base import Fraction
from megarl.algorithms.clipped import Clipped
from megarl.algorithms.gae import discounted_to_go, whiten
from megarl.algorithms.groups import GroupRelative, Scale
from megarl.algorithms.kl import KlKind
from megarl.algorithms.ops import Aggregation, SumOver
from megarl.batch import Batch
from megarl.lazy_torch import Tensor


class _Whitened(Clipped):
    """Adds the driver's number at the last token, propagates it back to the first with the tokens' KL, and whitens the result."""

    aggregation: Aggregation = "token-mean"

    @property
    def kl_per_sequence(self) -> bool:
        return False

    def _whitened(self, batch: Batch, sum_over: SumOver, kl_coef: float, gamma: float) -> Tensor:
        ends = batch.with_extra(reward=batch.extra_T["advantage"])
        return whiten(discounted_to_go(self.token_rewards(ends, kl_coef), batch, gamma), batch.mask_T, sum_over)


class ReinforcePp(_Whitened):
    """A_t = whitened sum_{k >= t} gamma^(k-t) r_k, with r_k = -beta kl_k, plus R at the last token."""

    type: Literal["reinforce_pp"] = "reinforce_pp"

    kl_in: Literal["loss", "reward"] = "reward"
    """Whether the KL is a term of the loss or subtracted from the reward."""
    gamma: Fraction = 1.0
    """Discount of a reward per token."""

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return reward_N.float()

    def token_advantages(self, batch: Batch, sum_over: SumOver, kl_coef: float) -> Tensor:
        return self._whitened(batch, sum_over, kl_coef, self.gamma)


class ReinforcePpBaseline(_Whitened, GroupRelative):
    """A_t = whitened (R_i - mean_group - beta sum_{k >= t} kl_k): the group's mean as baseline; the KL is in the loss (k2) by default."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"

    scale: Scale = "none"
    kl_kind: KlKind = "k2"
    """The KL's estimator."""

    def token_advantages(self, batch: Batch, sum_over: SumOver, kl_coef: float) -> Tensor:
        return self._whitened(batch, sum_over, kl_coef, 1.0)
