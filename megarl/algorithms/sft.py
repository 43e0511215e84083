"""Supervised fine-tuning: the negative log-likelihood of the response tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.base import Loss
from megarl.algorithms.ops import Average, Averaging, SumOver, token_weights
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class Sft:
    """loss_t = -lp_t at response tokens; by default the mean over all of them in the global batch."""

    name: ClassVar[str] = "sft"
    head: ClassVar[Literal["lm", "value"]] = "lm"
    responses: ClassVar[int] = 1
    needs_reference: ClassVar[bool] = False

    aggregation: Averaging = "token-mean"

    def weights(self, count_N: Tensor) -> Tensor:
        """The weight of each loss token of a sequence, float64 [N]."""
        return token_weights(count_N, self.aggregation)

    def loss(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """The negative log-prob of each token.

        Args:
            logp_T: float [T], log-probs of the targets.
            batch: the entries; `extra_T` has "entropy", which is reported.
            sum_over: unused: nothing is summed over ranks.

        Returns:
            The loss of each token, 0 at masked entries, with the metrics to report.
        """
        loss_T = torch.where(batch.mask_T, -logp_T, 0.0)
        tokens = batch.mask_T.count_nonzero()
        entropy = torch.where(batch.mask_T, batch.extra_T["entropy"].detach(), 0.0).sum()
        return Loss(loss_T, mean={"sft/loss": Average(loss_T.detach().sum(), tokens), "actor/entropy": Average(entropy, tokens)})
