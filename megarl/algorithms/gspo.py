"""GSPO: one importance ratio for a whole sequence (Zheng et al., arXiv:2507.18071)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from megarl.algorithms.base import Loss, PolicyAlgorithm
from megarl.algorithms.ops import Aggregation, SumOver, clip_share, clipped_surrogate, group_normalised, log_ratio, sequence_mean
from megarl.batch import Batch


class Gspo(PolicyAlgorithm):
    """s_i = exp((1/|o_i|) sum_t d_{i,t}); loss = (1/B) sum_i max(-s_i A_i, -clip(s_i, 1-low, 1+high) A_i).

    Written per token: every token of a sequence carries the sequence's loss, and the gradient of the ratio s_i * exp(lp_t - sg(lp_t)),
    whose mean over the tokens is the gradient of s_i. So no gradient crosses ranks, and a sequence may be cut by context parallelism.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 3e-4
    clip_high: Annotated[float, Field(ge=0)] = 4e-4

    @property
    def aggregation(self) -> Aggregation:
        return "seq-mean-token-mean"

    def advantages(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        return group_normalised(reward_N, group_N)

    def policy_loss(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        advantage_T = batch.extra_T["advantage"]
        d_T = log_ratio(logp_T, batch.extra_T["old_logp"], batch)
        ratio_T = torch.exp(d_T - d_T.detach() + batch.spread(sequence_mean(d_T, batch, sum_over)))
        loss_T = clipped_surrogate(ratio_T, advantage_T, self.clip_low, self.clip_high)
        high_T, low_T = clip_share(ratio_T.detach(), advantage_T, self.clip_low, self.clip_high)
        return Loss(
            torch.where(batch.mask_T, loss_T, torch.zeros_like(loss_T)),
            {"actor/pg_clipfrac": high_T + low_T, "actor/pg_clipfrac_lower": low_T},
        )
