"""RLOO: the plain policy gradient with the other responses to the prompt as baseline (Ahmadian et al., arXiv:2402.14740)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeFloat, model_validator

from megarl.algorithms.base import Fraction
from megarl.algorithms.groups import Baseline, GroupRelative, Scale
from megarl.algorithms.ops import Block, Term, bounded_ratio, clipped_surrogate
from megarl.algorithms.reinforce import PolicyGradient
from megarl.lazy_torch import Tensor


class Rloo(PolicyGradient, GroupRelative):
    """A_i = R_i - mean of the other G - 1 rewards; loss = (1/B) sum_i sum_t -sg(r_t) A_i lp_t.

    With `ratio: sequence`, as in TRL: (1/B) sum_i max(-s_i A_i, -clip(s_i, 1-low, 1+high) A_i) with s_i = exp(sum_t d_t). Each token
    then carries the share 1 / |o_i| of that loss, and all of its slope.
    """

    type: Literal["rloo"] = "rloo"

    baseline: Baseline = "leave_one_out"
    scale: Scale = "none"
    ratio: Literal["token", "sequence"] = "token"
    """The weight of stale data: each token's ratio, detached (token), or the ratio of the whole response, clipped as in PPO (sequence)."""
    clip_low: Fraction | None = None
    """The response's ratio is clipped below at 1 - clip_low; only with ratio=sequence, where the default is 0.2."""
    clip_high: NonNegativeFloat | None = None
    """The response's ratio is clipped above at 1 + clip_high; only with ratio=sequence, where the default is 0.2."""

    @model_validator(mode="before")
    @classmethod
    def _clip_of_ratio(cls, data: Any) -> Any:
        return {"clip_low": 0.2, "clip_high": 0.2, **data} if isinstance(data, dict) and data.get("ratio") == "sequence" else data

    @model_validator(mode="after")
    def _clips_what_is_there(self) -> Rloo:
        for key in ("clip_low", "clip_high"):
            value = getattr(self, key)
            if (value is None) != (self.ratio == "token"):
                raise ValueError(
                    f"{key}={'null' if value is None else f'{value:g}'} with ratio={self.ratio}: only ratio=sequence is clipped"
                )
        return self

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor | None:
        return None if self.ratio == "token" else d_T

    @property
    def joins_tokens(self) -> bool:
        return self.ratio == "sequence"

    def policy_term(self, block: Block) -> Term:
        if self.clip_low is None or self.clip_high is None:
            return super().policy_term(block)
        assert block.mean_T is not None
        ratio = bounded_ratio(block.mean_T * block.count_T, self.ratio_bound)
        term = clipped_surrogate(ratio, block.advantage_T, self.clip_low, self.clip_high)
        return Term(term.value_T.div_(block.count_T), term.slope_T, term.counts, term.clips_T)
