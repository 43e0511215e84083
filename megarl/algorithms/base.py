"""What an algorithm is: its settings, and the mathematics as methods on them (DESIGN: the algorithm is its config)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from megarl.algorithms.ops import Aggregation, KlKind, SumOver, kl_to_reference, log_ratio, token_weights
from megarl.batch import Batch

NonNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Loss:
    """A loss before aggregation, and what to show of it.

    `loss_T` is 0 with zero gradient at masked entries. `mean` is averaged over the loss tokens of the global batch, `peak` maximised.
    """

    loss_T: Tensor
    mean: Mapping[str, Tensor] = field(default_factory=dict)
    peak: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyAlgorithm(BaseModel):
    """A policy-gradient algorithm: rewards to advantages, and a loss per token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kl_coef: NonNegative = 0.0  # weight of the KL to the reference in the loss; above 0 a frozen reference is kept
    kl_kind: KlKind = "k3"
    entropy_coef: NonNegative = 0.0  # entropy bonus

    @property
    def aggregation(self) -> Aggregation:
        """How the tokens' losses become one number; fixed by the paper."""
        raise NotImplementedError

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def advantages(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        """One advantage per sequence, float32 [N], from all rewards of the step and the prompt that each belongs to."""
        raise NotImplementedError

    def policy_loss(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """The policy term. Reads `batch.extra_T["old_logp"]` and `["advantage"]`, both float [T]."""
        raise NotImplementedError

    def weights(self, count_N: Tensor) -> Tensor:
        """The weight of a loss token of each sequence of the global mini-batch, float64 [N]."""
        return token_weights(count_N, self.aggregation)

    def loss(self, logp_T: Tensor, entropy_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """policy term + kl_coef * KL(pi || ref) - entropy_coef * entropy, per token [T]."""
        policy = self.policy_loss(logp_T, batch, sum_over)
        d_T = log_ratio(logp_T.detach(), batch.extra_T["old_logp"], batch)
        mean = {**policy.mean, "actor/entropy": entropy_T.detach(), "actor/ppo_kl": -d_T}
        loss_T = policy.loss_T
        if self.kl_coef > 0:
            kl_T = kl_to_reference(logp_T, batch.extra_T["ref_logp"], batch, self.kl_kind)
            loss_T = loss_T + self.kl_coef * kl_T
            mean["actor/kl_loss"] = kl_T.detach()
        if self.entropy_coef > 0:
            loss_T = loss_T - self.entropy_coef * torch.where(batch.mask_T, entropy_T, torch.zeros_like(entropy_T))
        return Loss(loss_T, mean, {**policy.peak, "actor/ratio_max": d_T.exp(), "actor/ratio_inverse_max": (-d_T).exp()})
