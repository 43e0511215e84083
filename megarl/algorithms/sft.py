"""Supervised fine-tuning: the negative log-likelihood of the response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.base import Loss
from megarl.algorithms.ops import SumOver, token_weights
from megarl.batch import Batch


class Sft:
    """loss_t = -lp_t at response tokens, averaged over all of them in the global batch."""

    needs_reference = False

    def weights(self, count_N: Tensor) -> Tensor:
        """The weight of a loss token, float64 [N]."""
        return token_weights(count_N, "token-mean")

    def loss(self, logp_T: Tensor, entropy_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """Per token, 0 at masked entries."""
        loss_T = torch.where(batch.mask_T, -logp_T, torch.zeros_like(logp_T))
        return Loss(loss_T, {"sft/loss": loss_T.detach(), "actor/entropy": entropy_T.detach()})
