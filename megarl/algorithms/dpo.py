"""DPO and cDPO: preferences without a reward model (Rafailov et al., arXiv:2305.18290; label smoothing: Mitchell, 2023)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from megarl.algorithms.base import Loss
from megarl.algorithms.ops import Average, SumOver, attach, log_ratio
from megarl.algorithms.pairs import difference, pair_mean, pair_weights, sign
from megarl.batch import Batch


class Dpo(BaseModel):
    """z = beta ((lp_c - ref_c) - (lp_r - ref_r)), summed over tokens; loss = mean of -(1-e) log sigmoid(z) - e log sigmoid(-z)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: ClassVar[str] = "dpo"
    head: ClassVar[Literal["lm", "value"]] = "lm"
    responses: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = True

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the implicit KL to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the labels that are taken to be wrong (cDPO)."""

    def weights(self, count_N: Tensor) -> Tensor:
        """1 / (pairs of the global mini-batch), float64 [N]."""
        return pair_weights(count_N)

    def loss(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """Per token, 0 at masked entries: half of the pair's loss on each side, evenly over its tokens.

        Reads `batch.extra_T["ref_logp"]`. `sum_over` joins the context-parallel ranks (one collective of N numbers).
        """
        with torch.no_grad():
            reward_N = self.beta * sum_over(batch.sequence_sum(log_ratio(logp_T.detach(), batch.extra_T["ref_logp"], batch)))
            z_N = difference(reward_N)
            loss_N = -(1 - self.label_smoothing) * F.logsigmoid(z_N) - self.label_smoothing * F.logsigmoid(-z_N)
            slope_N = sign(batch) * (self.beta * (torch.sigmoid(z_N) - (1 - self.label_smoothing)))
            chosen = pair_mean(reward_N[0::2].repeat_interleave(2), batch)
            rejected = pair_mean(reward_N[1::2].repeat_interleave(2), batch)
            mean = {
                "dpo/loss": pair_mean(loss_N, batch),
                "dpo/accuracy": pair_mean((z_N > 0).to(z_N.dtype), batch),
                "dpo/margin": pair_mean(z_N, batch),
                "dpo/chosen_reward": chosen,
                "dpo/rejected_reward": rejected,
                "dpo/chosen_shift": Average(chosen.total / self.beta, chosen.weight),  # of the response's log-prob from the reference's
                "dpo/rejected_shift": Average(rejected.total / self.beta, rejected.weight),
            }
            loss_T = torch.where(batch.mask_T, batch.spread(loss_N / (2 * batch.count_N.clamp(min=1))), 0.0)
            slope_T = torch.where(batch.mask_T, batch.spread(slope_N), 0.0)
        return Loss(attach(logp_T, loss_T, slope_T), mean=mean)
