"""DPPO: a trust region in probability, measured from the rollout policy, instead of a clip of the ratio (Qi et al., arXiv:2602.04879)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, Term, bounded_ratio, surrogate
from megarl.lazy_torch import Tensor, torch

DELTA = {"tv": 0.15, "kl": 0.05}


class Dppo(GroupRelative):
    """loss_t = -M_t r_t A_t with r = pi / mu, mu the rollout policy; M_t = 0 where the update would leave the trust region.

    That is where A_t > 0, pi > mu and D > delta_high, or A_t < 0, pi < mu and D > delta_low. D is a divergence between two Bernoulli
    distributions, the sampled token against all others (the paper's binary approximations):

    - tv: |pi - mu|
    - kl: mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), from the rollout policy to the policy

    M and D are detached. With `ratio_cap`, r is truncated at it and keeps its gradient's direction: the slope is -min(r, cap) A.
    """

    type: Literal["dppo"] = "dppo"
    aggregation: Aggregation = "token-mean"

    divergence: Literal["tv", "kl"] = "tv"
    """The binary divergence: total variation or KL."""
    delta_low: NonNegativeFloat = DELTA["tv"]
    """Largest divergence at which a token with a negative advantage still loses probability; with divergence=kl the default is 0.05."""
    delta_high: NonNegativeFloat = DELTA["tv"]
    """Largest divergence at which a token with a positive advantage still gains probability; with divergence=kl the default is 0.05."""
    ratio_cap: Annotated[float, Field(ge=1)] | None = None
    """Largest ratio to the rollout policy; null: no limit but `ratio_bound`."""

    @model_validator(mode="before")
    @classmethod
    def _delta_of_divergence(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("divergence") == "kl":
            return {"delta_low": DELTA["kl"], "delta_high": DELTA["kl"], **data}
        return data

    @model_validator(mode="after")
    def _corrected_once(self) -> Dppo:
        if self.correction is not None:
            raise ValueError(
                f"correction.type={self.correction.type} with type=dppo: its ratio is to the rollout policy already; remove it"
            )
        return self

    def policy_term(self, block: Block) -> Term:
        gap_T = block.lp_T - block.roll_T
        ratio = bounded_ratio(gap_T, self.ratio_bound)
        if self.ratio_cap is not None:
            ratio = Term(ratio.value_T.clamp_(max=self.ratio_cap), ratio.slope_T.clamp_(max=self.ratio_cap))
        far_T = self._divergence(block.lp_T.clamp(max=0), block.roll_T.clamp(max=0))
        high_T = (block.advantage_T > 0) & (gap_T > 0) & (far_T > self.delta_high)
        low_T = (block.advantage_T < 0) & (gap_T < 0) & (far_T > self.delta_low)
        high, low = ((cut_T & block.mask_T).count_nonzero() for cut_T in (high_T, low_T))
        counts = {"actor/pg_clipfrac": high + low, "actor/pg_clipfrac_high": high, "actor/pg_clipfrac_low": low}
        masked_T = high_T | low_T
        loss = surrogate(ratio, block.advantage_T)
        return Term(loss.value_T.masked_fill_(masked_T, 0.0), loss.slope_T.masked_fill_(masked_T, 0.0), counts)

    def _divergence(self, lp_T: Tensor, roll_T: Tensor) -> Tensor:
        if self.divergence == "tv":
            return (lp_T.exp() - roll_T.exp()).abs_()
        others_T, rollout_others_T = -torch.expm1(lp_T), -torch.expm1(roll_T)  # 1 - p, exact near p = 1
        rest_T = rollout_others_T * (rollout_others_T.log() - others_T.log())
        return roll_T.exp() * (roll_T - lp_T) + torch.where(rollout_others_T > 0, rest_T, 0.0)
