"""Correction of the gap between the rollout engine's probabilities and the trainer's: a detached weight on each token's loss.

d_t = old_t - roll_t is the log of what the trainer thinks of a token over what the engine sampled it with (extra_T["old_logp"],
["rollout_logp"]). A token that is left out counts in the denominator as before.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor


class _Correction(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    level: Literal["token", "sequence"] = "token"
    """One weight for each token, or one for each sequence."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A sequence with any ratio below this floor gets weight 0."""

    def sequence_terms(self, d_T: Tensor) -> list[Tensor]:
        """The numbers of each token, from d (0 at masked entries), whose sums over whole sequences `weight` needs."""
        joined = [d_T] if self.level == "sequence" else []
        return joined if self.veto is None else [*joined, (d_T < math.log(self.veto)).to(d_T.dtype)]

    def weight(self, d_T: Tensor, sums: list[Tensor]) -> Tensor:
        """w_T >= 0, float [T], from d and the sums [T] of `sequence_terms`; undefined at masked entries."""
        weight_T = self.of_log_ratio(sums[0] if self.level == "sequence" else d_T)
        return weight_T if self.veto is None else weight_T.masked_fill_(sums[-1] > 0, 0.0)

    def of_log_ratio(self, d_T: Tensor) -> Tensor:
        """w before the veto from the log ratio of a token, or of its sequence (the sum over its loss tokens), in a tensor of its own."""
        raise NotImplementedError


class Tis(_Correction):
    """Truncated importance sampling (Yao et al., 2025): w = min(exp(d), cap)."""

    type: Literal["tis"] = "tis"
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Largest weight."""

    def of_log_ratio(self, d_T: Tensor) -> Tensor:
        return d_T.clamp(max=math.log(self.cap)).exp_()


class _Masked(_Correction):
    lo: Annotated[float, Field(ge=0)] = 0.5
    """Smallest ratio that keeps its weight."""
    hi: Annotated[float, Field(gt=0)] = 2.0
    """Largest ratio that keeps its weight."""

    @model_validator(mode="after")
    def _ordered(self) -> _Masked:
        if self.lo >= self.hi:
            raise ValueError(f"lo={self.lo:g} is not below hi={self.hi:g}: every token would get weight 0")
        return self

    def of_log_ratio(self, d_T: Tensor) -> Tensor:
        weight_T = d_T.exp()
        return weight_T.masked_fill_((weight_T < self.lo) | (weight_T > self.hi), 0.0)


class Mis(_Masked):
    """Masked importance sampling (Liu et al., 2025): w = exp(d) inside [lo, hi], 0 outside."""

    type: Literal["mis"] = "mis"


class IcePop(_Masked):
    """IcePop (Ring-1T, arXiv:2510.18855): masked importance sampling per token, with the paper's interval."""

    type: Literal["icepop"] = "icepop"
    hi: Annotated[float, Field(gt=0)] = 5.0
    """Largest ratio that keeps its weight."""
    level: Literal["token"] = "token"
    """One weight for each token."""


Correction = Annotated[Tis | Mis | IcePop, Field(discriminator="type")]
