"""Supervised fine-tuning: the negative log-likelihood of the response tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.base import Loss
from megarl.algorithms.ops import Average, token_weights
from megarl.batch import Batch


class Sft:
    """loss_t = -lp_t at response tokens, averaged over all of them in the global batch."""

    def weights(self, count_N: Tensor) -> Tensor:
        """The weight of a loss token, float64 [N]."""
        return token_weights(count_N, "token-mean")

    def loss(self, logp_T: Tensor, entropy_T: Tensor, batch: Batch) -> Loss:
        """Per token, 0 at masked entries; the entropy is only shown."""
        loss_T = torch.where(batch.mask_T, -logp_T, 0.0)
        tokens = batch.mask_T.count_nonzero()
        entropy = torch.where(batch.mask_T, entropy_T.detach(), 0.0).sum()
        return Loss(loss_T, mean={"sft/loss": Average(loss_T.detach().sum(), tokens), "actor/entropy": Average(entropy, tokens)})
