"""Corrections of the gap between the rollout engine's and the trainer's probabilities: a detached weight on each token's policy loss.

g_t = old_t - roll_t is the log ratio of the trainer's probability of a token to the engine's when it sampled the token
(extra_T["old_logp"], ["rollout_logp"]). Both are known before the first update of a step, so the weights are computed once, on whole
sequences, for all mini-batches and epochs of the step. A correction has three parts, in this order, each optional:

1. a ratio, exp of g at one of three levels, truncated (`Tis`) or masked (`Mis`, `IcePop`) at its bounds;
2. `normalise`: the ratio is divided by its mean;
3. `reject` and `veto`: tokens or whole sequences are dropped, with weight 0.

Logs are clamped to +-20 before exp. Axes: T entries, N sequences.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from megarl.algorithms.ops import SumOver, log_ratio
from megarl.algorithms.settings import Settings
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch

BOUND = 20.0  # on a log ratio, up or down: exp(20) = 5e8

RatioLevel = Literal["token", "sequence", "geometric"]


class Rejection(Settings):
    """A rule that drops tokens, or sequences, whose divergence is out of bounds (verl's `rollout_rs`, slime's `rs`).

    Out of bounds means, for k1, that the ratio exp(g) is outside [lo, hi]; for k2, g^2 / 2 > hi; for k3, exp(g) - 1 - g > hi.
    `over: token` tests each token and drops only that token. The others drop the whole sequence: `sum` and `mean` test the sum or the mean
    over its loss tokens (k1: the ratio exp(sum g), or its geometric mean), `max` tests its worst token.
    """

    by: Literal["k1", "k2", "k3"] = "k1"
    """The divergence: k1 (the ratio itself), k2 or k3."""
    over: Literal["token", "sum", "mean", "max"] = "token"
    """What is tested: each token, or each sequence by its sum, its mean or its worst token."""
    lo: NonNegativeFloat | None = None
    """Smallest ratio to keep (k1 only); null: no lower limit."""
    hi: PositiveFloat | None = None
    """Largest ratio (k1) or divergence (k2, k3) to keep; null: no upper limit."""

    @model_validator(mode="after")
    def _bounded(self) -> Rejection:
        if self.by != "k1" and (self.lo is not None or self.hi is None):
            raise ValueError(f"by={self.by} has one bound, hi: a divergence is never too small")
        if self.lo is None and self.hi is None:
            raise ValueError("neither lo nor hi: nothing would be dropped")
        if self.lo is not None and self.hi is not None and self.lo >= self.hi:
            raise ValueError(f"lo={self.lo:g} is not below hi={self.hi:g}: every token would be dropped")
        return self

    def keeps(self, gap_T: Tensor, batch: Batch) -> Tensor:
        """Which loss tokens to keep, bool [T], given g on whole sequences (0 at masked entries)."""
        low, high = -math.inf, math.inf if self.hi is None else self.hi
        if self.by == "k1":
            value_T = gap_T
            low = math.log(self.lo) if self.lo else -math.inf
            high = math.log(high)
        elif self.by == "k2":
            value_T = gap_T.square() / 2
        else:
            value_T = torch.expm1(gap_T.clamp(-BOUND, BOUND)) - gap_T.clamp(-BOUND, BOUND)
        if self.over in ("sum", "mean"):
            value_T = over_sequence(value_T, batch, self.over == "mean")
        inside_T = (value_T >= low) & (value_T <= high)
        if self.over != "max":
            return inside_T
        return batch.spread(batch.sequence_sum((~inside_T).double()) == 0)


class _Correction(Settings):
    reject: list[Rejection] = []
    """Rules for dropping tokens or sequences."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Drop a sequence if any token's ratio is below this floor."""
    denominator: Literal["all", "kept"] = "all"
    """What the loss is averaged over: all loss tokens, or only those with a weight above 0 (`kept`).

    all, as in TRL and IcePop: a dropped token counts as a sample of weight 0; its KL and entropy terms stay, no other token's weight
    depends on it, and the fewer tokens are left, the smaller the step. kept, as in verl and slime: a dropped token leaves the batch, with
    all of its terms.
    """

    def weights(self, batch: Batch, sum_over: SumOver) -> Tensor:
        """The weight of each token [T], in the dtype of the log-probs: >= 0, and 0 exactly where the token is dropped or masked.

        Args:
            batch: whole sequences; `extra_T` has "old_logp" and "rollout_logp".
            sum_over: sums over ALL data-parallel ranks; called only with `normalise`.
        """
        gap_T = log_ratio(batch.extra_T["old_logp"], batch.extra_T["rollout_logp"], batch)
        weight_T = torch.where(batch.mask_T, self.of_gap(gap_T, batch, sum_over), 0.0)
        veto = [] if self.veto is None else [Rejection(over="max", lo=self.veto)]
        for rejection in self.reject + veto:
            weight_T.masked_fill_(~rejection.keeps(gap_T, batch), 0.0)
        return weight_T

    def of_gap(self, gap_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        """The weights before rejection; undefined at masked entries.

        Args:
            gap_T: g, 0 at masked entries.
            batch: the tokens, in whole sequences.
            sum_over: sums over ALL data-parallel ranks.
        """
        raise NotImplementedError


class RejectionAlone(_Correction):
    """Every token has weight 1, except dropped ones."""

    type: Literal["rejection"] = "rejection"

    @model_validator(mode="after")
    def _drops(self) -> RejectionAlone:
        if not self.reject and self.veto is None:
            raise ValueError("type=rejection without reject or veto: nothing would be corrected")
        return self

    def of_gap(self, gap_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        return torch.ones_like(gap_T)


class _Weighted(_Correction):
    level: RatioLevel = "token"
    """Which ratio to use: the token's, exp(g); its sequence's, exp(sum g); or the sequence's geometric mean, exp(mean g)."""
    normalise: bool = False
    """Divide the weights by their mean over the step: at token level over its loss tokens, otherwise over its sequences."""

    def of_gap(self, gap_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        level_T = gap_T if self.level == "token" else over_sequence(gap_T, batch, self.level == "geometric")
        weight_T = self.bounded(level_T.clamp(-BOUND, BOUND))
        return weight_T / self._mean(weight_T, batch, sum_over) if self.normalise else weight_T

    def bounded(self, level_T: Tensor) -> Tensor:
        """The ratio within its bounds, computed from its log, in a new tensor."""
        raise NotImplementedError

    def _mean(self, weight_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        """The weights' mean over the step; 1 if all of them are 0."""
        share_T = batch.mask_T.double()
        if self.level != "token":
            share_T = share_T / batch.spread(batch.count_N).clamp(min=1)
        total, count = sum_over(torch.stack([(weight_T * share_T).sum(), share_T.sum()])).unbind()
        return torch.where(total > 0, total / count, 1.0).to(weight_T.dtype)


def over_sequence(value_T: Tensor, batch: Batch, mean: bool) -> Tensor:
    """The sum, or the mean, over the loss tokens of each entry's sequence, in float64.

    Args:
        value_T: float [T], 0 at masked entries.
        batch: whole sequences.
        mean: divide by the sequence's number of loss tokens.

    Returns:
        [T], the same number at all entries of a sequence.
    """
    total_N = batch.sequence_sum(value_T.double())
    if mean:
        total_N = total_N / batch.count_N.clamp(min=1)
    return batch.spread(total_N.to(value_T.dtype))


class Tis(_Weighted):
    """Truncated importance sampling (Yao et al., 2025): w = clamp(ratio, floor, cap)."""

    type: Literal["tis"] = "tis"
    cap: PositiveFloat = 2.0
    """Largest weight."""
    floor: NonNegativeFloat = 0.0
    """Smallest weight."""

    @model_validator(mode="after")
    def _ordered(self) -> Tis:
        if self.floor >= self.cap:
            raise ValueError(f"floor={self.floor:g} is not below cap={self.cap:g}: every weight would be the same")
        return self

    def bounded(self, level_T: Tensor) -> Tensor:
        return level_T.clamp(min=math.log(self.floor) if self.floor else None, max=math.log(self.cap)).exp_()


class _Masked(_Weighted):
    lo: NonNegativeFloat = 0.5
    """Smallest ratio that keeps its weight."""
    hi: PositiveFloat = 2.0
    """Largest ratio that keeps its weight."""

    @model_validator(mode="after")
    def _ordered(self) -> _Masked:
        if self.lo >= self.hi:
            raise ValueError(f"lo={self.lo:g} is not below hi={self.hi:g}: every token would get weight 0")
        return self

    def bounded(self, level_T: Tensor) -> Tensor:
        weight_T = level_T.exp()
        return weight_T.masked_fill_((weight_T < self.lo) | (weight_T > self.hi), 0.0)


class Mis(_Masked):
    """Masked importance sampling (Liu et al., 2025): w = the ratio inside [lo, hi], 0 outside."""

    type: Literal["mis"] = "mis"


class IcePop(_Masked):
    """IcePop (Ring-1T, arXiv:2510.18855): masked importance sampling per token, with the paper's interval."""

    type: Literal["icepop"] = "icepop"
    hi: PositiveFloat = 5.0
    """Largest ratio that keeps its weight."""
    level: Literal["token"] = "token"
    """Which ratio to use: the token's, exp(g)."""


Correction = Annotated[Tis | Mis | IcePop | RejectionAlone, Field(discriminator="type")]
