"""The reward model's loss on pairs (Bradley and Terry, 1952; with a margin: Touvron et al., arXiv:2307.09288, eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.base import Loss
from megarl.algorithms.ops import SumOver, attach
from megarl.algorithms.pairs import difference, pair_mean, pair_weights, sign
from megarl.batch import Batch
from megarl.lazy_torch import F, Tensor, torch


@dataclass(frozen=True)
class BradleyTerry:
    """loss = mean over pairs of -log sigmoid(r_chosen - r_rejected - margin) + centre (r_chosen + r_rejected)^2.

    The second term centres the scores, which the first leaves free to drift together (Eisenstein et al., arXiv:2312.09244, section 2).

    Each sequence has one loss token: the entry that feeds its last token, where the scalar head's output is its score r.
    """

    name: ClassVar[str] = "rm"
    head: ClassVar[Literal["lm", "value"]] = "value"
    responses: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = False

    centre: float = 0.0

    def weights(self, count_N: Tensor) -> Tensor:
        """1 / (pairs of the global mini-batch), float64 [N]."""
        return pair_weights(count_N)

    def loss(self, score_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """The pair's loss on the last token of each side.

        Args:
            score_T: float [T], the scalar head's output.
            batch: both sides of each pair; `extra_T` may have "margin" (>= 0, read at the chosen sequence's loss token).
            sum_over: sums over the context-parallel ranks (one collective of N or 2 N numbers).

        Returns:
            The loss of each token, 0 at masked entries, with the metrics to report.
        """
        with torch.no_grad():
            held_N = [batch.sequence_sum(score_T.detach())]
            if "margin" in batch.extra_T:
                held_N.append(batch.sequence_sum(batch.extra_T["margin"]))
            score_N, *margins_N = sum_over(torch.stack(held_N))
            gap_N = difference(score_N)
            z_N = gap_N - margins_N[0][0::2].repeat_interleave(2) if margins_N else gap_N
            loss_N, slope_N = -F.logsigmoid(z_N), -sign(batch) * torch.sigmoid(-z_N)
            if self.centre:
                both_N = (score_N[0::2] + score_N[1::2]).repeat_interleave(2)
                loss_N, slope_N = loss_N + self.centre * both_N.square(), slope_N + 2 * self.centre * both_N
            mean = {
                "rm/loss": pair_mean(loss_N, batch),
                "rm/accuracy": pair_mean((gap_N > 0).to(gap_N.dtype), batch),
                "rm/gap": pair_mean(gap_N, batch),
            }
            loss_T = torch.where(batch.mask_T, batch.spread(loss_N / 2), 0.0)
            slope_T = torch.where(batch.mask_T, batch.spread(slope_N), 0.0)
        return Loss(attach(score_T, loss_T, slope_T), mean=mean)
