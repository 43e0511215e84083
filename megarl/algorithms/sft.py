"""Supervised fine-tuning: the negative log-likelihood of the response tokens, or the distance to what a teacher has said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from megarl.algorithms.base import Loss
from megarl.algorithms.distillation import Divergence, divergence
from megarl.algorithms.ops import Average, Averaging, SumOver, token_weights
from megarl.algorithms.settings import Settings
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch


class StoredDistillation(Settings):
    """loss_t = coef D_t - nll_weight lp_t, with D_t the divergence in the buckets of the teacher's likeliest tokens, as on policy."""

    divergence: Divergence = "forward_kl"
    """KL(teacher || policy), KL(policy || teacher), or the Jensen-Shannon divergence."""
    coef: PositiveFloat = 1.0
    """Weight of the divergence."""
    nll_weight: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of the response itself."""


@dataclass(frozen=True)
class Sft:
    """loss_t = -lp_t at response tokens, or that of `StoredDistillation`; by default the mean over all of them in the global batch."""

    name: ClassVar[str] = "sft"
    head: ClassVar[Literal["lm", "value"]] = "lm"
    responses: ClassVar[int] = 1
    needs_reference: ClassVar[bool] = False

    aggregation: Averaging = "token-mean"
    distillation: StoredDistillation | None = None

    def weights(self, count_N: Tensor) -> Tensor:
        """The weight of each loss token of a sequence, float64 [N]."""
        return token_weights(count_N, self.aggregation)

    def loss(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """The negative log-prob of each token.

        Args:
            logp_T: float [T], log-probs of the targets.
            batch: the entries; `extra_T` has "entropy", which is reported; with `distillation` also "policy_buckets" and "teacher_buckets",
                float [T, B], the log-probs of the tokens that the teacher names and of all others.
            sum_over: unused: nothing is summed over ranks.

        Returns:
            The loss of each token, 0 at masked entries, with the metrics to report.
        """
        tokens = batch.mask_T.count_nonzero()

        def mean(value_T: Tensor) -> Average:
            return Average(torch.where(batch.mask_T, value_T.detach(), 0.0).sum(), tokens)

        nll_T = torch.where(batch.mask_T, -logp_T, 0.0)
        entropy = {"actor/entropy": mean(batch.extra_T["entropy"])}
        if self.distillation is None:
            return Loss(nll_T, mean={"sft/loss": mean(nll_T), **entropy})
        buckets = batch.extra_T["policy_buckets"], batch.extra_T["teacher_buckets"]
        apart_T = divergence(*buckets, self.distillation.divergence).masked_fill(~batch.mask_T, 0.0)
        loss_T = self.distillation.coef * apart_T + self.distillation.nll_weight * nll_T
        return Loss(loss_T, mean={"sft/loss": mean(loss_T), "sft/divergence": mean(apart_T), "sft/nll": mean(nll_T), **entropy})
