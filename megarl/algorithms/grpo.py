"""GRPO: group-relative advantages, PPO's clipped loss, sequence means (Shao et al., arXiv:2402.03300)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from megarl.algorithms.base import Loss, PolicyAlgorithm
from megarl.algorithms.ops import Aggregation, SumOver, clip_share, clipped_surrogate, group_normalised, log_ratio
from megarl.batch import Batch


class Grpo(PolicyAlgorithm):
    """A_i = (R_i - mean_group) / (std_group + 1e-6); loss = (1/B) sum_i (1/|o_i|) sum_t max(-r A, -clip(r, 1-low, 1+high) A)."""

    type: Literal["grpo"] = "grpo"
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2

    @property
    def aggregation(self) -> Aggregation:
        return "seq-mean-token-mean"

    def advantages(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        return group_normalised(reward_N, group_N)

    def policy_loss(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        advantage_T = batch.extra_T["advantage"]
        ratio_T = log_ratio(logp_T, batch.extra_T["old_logp"], batch).exp()
        loss_T = clipped_surrogate(ratio_T, advantage_T, self.clip_low, self.clip_high)
        high_T, low_T = clip_share(ratio_T.detach(), advantage_T, self.clip_low, self.clip_high)
        return Loss(
            torch.where(batch.mask_T, loss_T, torch.zeros_like(loss_T)),
            {"actor/pg_clipfrac": high_T + low_T, "actor/pg_clipfrac_lower": low_T},
        )
