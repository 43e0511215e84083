"""SAPO: a smooth gate instead of a clip (Gao et al., arXiv:2511.20347)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, Term, bounded_ratio
from megarl.lazy_torch import torch


class Sapo(GroupRelative):
    """loss_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with tau_positive where A_t > 0 and tau_negative elsewhere.

    Its slope is PPO's without a clip, -r_t A_t, times 4 p (1 - p) with p the sigmoid: 1 where r_t = 1, and less the further r_t is from 1.
    """

    type: Literal["sapo"] = "sapo"
    aggregation: Aggregation = "seq-mean-token-mean"

    tau_positive: PositiveFloat = 1.0
    """Sharpness of the gate where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """Sharpness of the gate elsewhere; larger than tau_positive in the paper, since negative advantages make training less stable."""

    def policy_term(self, block: Block) -> Term:
        ratio = bounded_ratio(block.d_T, self.ratio_bound)
        tau_T = torch.full_like(block.d_T, self.tau_negative).masked_fill_(block.advantage_T > 0, self.tau_positive)
        gate_T = ratio.value_T.sub_(1).mul_(tau_T).sigmoid_()
        kept_T = 4 * gate_T * (1 - gate_T)
        value_T = gate_T.mul_(4).div_(tau_T).mul_(block.advantage_T).neg_()
        slope_T = ratio.slope_T.mul_(kept_T).mul_(block.advantage_T).neg_()
        return Term(value_T, slope_T, {"actor/pg_gated": (1 - kept_T).sum()})
