"""What the losses on pairs of responses share.

Sequences 2k and 2k + 1 of a batch are the chosen and the rejected response to one prompt; a micro-batch holds whole pairs in this order.
The loss of a pair depends on each side through a few numbers, which are summed over the ranks that share the sequence; each token then
carries its part of the value and its slope, so that no gradient crosses ranks. Axes: T entries, N sequences, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from megarl.algorithms.base import Loss
from megarl.algorithms.ops import Average, SumOver, attach, log_ratio
from megarl.algorithms.settings import Settings
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class Side:
    """The chosen, or the rejected, responses of the pairs."""

    logp_P: Tensor  # log-prob of the whole response
    shift_P: Tensor  # logp_P minus the reference's; without a reference, logp_P
    count_P: Tensor  # the response's number of loss tokens, in the dtype of the others


class PairLoss(Settings):
    """A preference loss: its settings, and a formula of both sides of the pairs that autograd differentiates."""

    name: ClassVar[str] = "dpo"  # the stage's name, not the loss's: metrics are compared, plotted and announced under it
    head: ClassVar[Literal["lm", "value"]] = "lm"
    responses: ClassVar[int] = 2
    needs_reference: ClassVar[bool] = True

    def reward(self, side: Side) -> Tensor:
        """The reward that the loss implies for each response [P]; accuracy and margin are computed from it."""
        raise NotImplementedError

    def pair_loss(self, chosen: Side, rejected: Side) -> Tensor:
        """The loss of each pair [P]."""
        raise NotImplementedError

    def weights(self, count_N: Tensor) -> Tensor:
        """1 / (pairs of the global mini-batch), float64 [N]."""
        return pair_weights(count_N)

    def loss(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """The pair's loss, half of it on each side, spread evenly over the side's tokens.

        Args:
            logp_T: float [T], log-probs of the targets.
            batch: both sides of each pair; with a reference, `extra_T` has "ref_logp".
            sum_over: sums over the context-parallel ranks (one collective of N or 2 N numbers).

        Returns:
            The loss of each token, 0 at masked entries, with the metrics to report.
        """
        with torch.no_grad():
            held_N = [batch.sequence_sum(logp_T.detach())]
            if self.needs_reference:
                held_N.append(batch.sequence_sum(log_ratio(logp_T.detach(), batch.extra_T["ref_logp"], batch)))
            sums = sum_over(torch.stack(held_N))
            logp_N, shift_N, count_N = sums[0], sums[-1], batch.count_N.clamp(min=1).to(logp_T.dtype)
        with torch.enable_grad():
            step_N = torch.zeros_like(logp_N, requires_grad=True)
            moved = (logp_N + step_N, shift_N + step_N, count_N)
            chosen, rejected = (Side(*(value_N[side::2] for value_N in moved)) for side in (0, 1))
            loss_P, rewards = self.pair_loss(chosen, rejected), (self.reward(chosen), self.reward(rejected))
            [slope_N] = torch.autograd.grad(loss_P.sum(), step_N)
        with torch.no_grad():
            margin_P = rewards[0] - rewards[1]
            shown = {"loss": loss_P, "accuracy": (margin_P > 0).to(margin_P.dtype), "margin": margin_P}
            shown |= {"chosen_reward": rewards[0], "rejected_reward": rewards[1]}
            if self.needs_reference:  # the response's log-prob minus the reference's
                shown |= {"chosen_shift": chosen.shift_P, "rejected_shift": rejected.shift_P}
            mean = {f"{self.name}/{key}": pair_mean(value_P.detach().repeat_interleave(2), batch) for key, value_P in shown.items()}
            loss_T = torch.where(batch.mask_T, batch.spread(loss_P.detach().repeat_interleave(2) / (2 * count_N)), 0.0)
            slope_T = torch.where(batch.mask_T, batch.spread(slope_N), 0.0)
        return Loss(attach(logp_T, loss_T, slope_T), mean=mean)


def pair_weights(count_N: Tensor) -> Tensor:
    """1 / (pairs of the global mini-batch) for every token of its sequences, float64 [N]. ValueError if these are not whole pairs."""
    if len(count_N) == 0 or len(count_N) % 2 or bool((count_N == 0).any()):
        raise ValueError(f"{len(count_N)} sequences, {int((count_N == 0).sum())} of them without loss tokens, are no whole pairs")
    return torch.full((len(count_N),), 2.0 / len(count_N), dtype=torch.float64)


def sign(batch: Batch) -> Tensor:
    """+1 for chosen, -1 for rejected sequences, int64 [N]."""
    return 1 - 2 * (torch.arange(len(batch.length_N), device=batch.length_N.device) % 2)


def difference(score_N: Tensor) -> Tensor:
    """chosen - rejected of each pair, at both of its sequences [N]."""
    return (score_N[0::2] - score_N[1::2]).repeat_interleave(2)


def pair_mean(value_N: Tensor, batch: Batch) -> Average:
    """The mean over all pairs of a number per pair [N], however they are split over ranks: each loss token counts for its share."""
    share_T = torch.where(batch.mask_T, batch.spread(0.5 / batch.count_N.clamp(min=1).to(value_N.dtype)), 0.0)
    return Average((share_T * batch.spread(value_N)).sum(), share_T.sum())
