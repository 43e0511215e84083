"""REINFORCE++ and REINFORCE++-baseline: token rewards, whitened over the global batch, PPO's clipped loss (Hu et al., arXiv:2501.03262)."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from megarl.algorithms.base import Fraction
from megarl.algorithms.clipped import Clipped
from megarl.algorithms.gae import Variance, discounted_to_go, whiten
from megarl.algorithms.groups import GroupRelative, Scale
from megarl.algorithms.kl import KlKind
from megarl.algorithms.ops import Aggregation, SumOver
from megarl.batch import Batch
from megarl.lazy_torch import Tensor


class _Whitened(Clipped):
    """Adds the driver's number at the last token, propagates it back to the first with the tokens' KL, and whitens the result."""

    aggregation: Aggregation = "token-mean"

    whiten_variance: Variance = "sample"
    kl_at: Literal["to_go", "token", "sequence"] = "to_go"
    """What a token's advantage has of a KL in the reward: that of its own and all later tokens, discounted (to_go); its own (token); or
    that of the whole response, subtracted from the reward before any baseline (sequence)."""

    @model_validator(mode="after")
    def _kl_is_there(self) -> _Whitened:
        if self.kl_at != "to_go" and self.kl_in != "reward":
            raise ValueError(f"kl_at={self.kl_at} with kl_in={self.kl_in}: the reward has no KL; set kl_in=reward")
        return self

    @property
    def kl_per_sequence(self) -> bool:
        return self.kl_coef > 0 and self.kl_at == "sequence"

    def _whitened(self, batch: Batch, sum_over: SumOver, kl_coef: float, gamma: float) -> Tensor:
        ends = batch.with_extra(reward=batch.extra_T["advantage"])
        advantage_T = discounted_to_go(self.token_rewards(ends, kl_coef if self.kl_at == "to_go" else 0.0), batch, gamma)
        if self.kl_at == "token":
            advantage_T = advantage_T - kl_coef * self.old_kl(batch)
        return whiten(advantage_T, batch.mask_T, sum_over, self.whiten_variance)


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
