"""Correction of the gap between the rollout engine's probabilities and the trainer's: a detached weight on each token's loss.

d_t = old_t - roll_t is the log of what the trainer thinks of a token over what the engine sampled it with (extra_T["old_logp"],
["rollout_logp"]). A token that is left out counts in the denominator as before.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from megarl.algorithms.ops import SumOver, log_ratio
from megarl.batch import Batch

Level = Literal["token", "sequence"]


class _Correction(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    veto: Annotated[float, Field(gt=0, lt=1)] | None = None  # a sequence with any ratio below this floor gets weight 0

    def weight(self, batch: Batch, sum_over: SumOver) -> Tensor:
        """w_T >= 0, float [T], a tensor of its own; of no meaning at masked entries. `sum_over` joins the context-parallel ranks."""
        d_T = log_ratio(batch.extra_T["old_logp"], batch.extra_T["rollout_logp"], batch)
        weight_T = self.of_ratio(d_T, batch, sum_over)
        if self.veto is not None:
            low_N = sum_over(batch.sequence_sum((d_T < math.log(self.veto)).to(d_T.dtype)))
            weight_T.masked_fill_(batch.spread(low_N > 0), 0.0)
        return weight_T

    def of_ratio(self, d_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        """w_T before the veto, in a tensor of its own."""
        raise NotImplementedError


def _joined(d_T: Tensor, level: Level, batch: Batch, sum_over: SumOver) -> Tensor:
    """The log ratio of each token, or of its whole sequence (the sum over its loss tokens)."""
    return d_T.clone() if level == "token" else batch.spread(sum_over(batch.sequence_sum(d_T)))


class Tis(_Correction):
    """Truncated importance sampling (Yao et al., 2025): w = min(exp(d), cap)."""

    type: Literal["tis"] = "tis"
    cap: Annotated[float, Field(gt=0)] = 2.0
    level: Level = "token"

    def of_ratio(self, d_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        return _joined(d_T, self.level, batch, sum_over).clamp_(max=math.log(self.cap)).exp_()


class _Masked(_Correction):
    lo: Annotated[float, Field(ge=0)] = 0.5
    hi: Annotated[float, Field(gt=0)] = 2.0
    level: Level = "token"

    @model_validator(mode="after")
    def _ordered(self) -> _Masked:
        if self.lo >= self.hi:
            raise ValueError(f"lo={self.lo:g} is not below hi={self.hi:g}: every token would get weight 0")
        return self

    def of_ratio(self, d_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        weight_T = _joined(d_T, self.level, batch, sum_over).exp_()
        return weight_T.masked_fill_((weight_T < self.lo) | (weight_T > self.hi), 0.0)


class Mis(_Masked):
    """Masked importance sampling (Liu et al., 2025): w = exp(d) inside [lo, hi], 0 outside."""

    type: Literal["mis"] = "mis"


class IcePop(_Masked):
    """IcePop (Ring-1T, arXiv:2510.18855): masked importance sampling per token, with the paper's interval."""

    type: Literal["icepop"] = "icepop"
    hi: Annotated[float, Field(gt=0)] = 5.0
    level: Literal["token"] = "token"


Correction = Annotated[Tis | Mis | IcePop, Field(discriminator="type")]


def weight_counts(weight_T: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
    """Sums over the loss tokens held here of the weights and of those that are 0. Sets masked entries' weights to 0."""
    weight_T.masked_fill_(~mask_T, 0.0)
    return {
        "rollout_corr/weight_mean": weight_T.sum(),
        "rollout_corr/weight_zeroed": ((weight_T == 0) & mask_T).count_nonzero(),
    }
