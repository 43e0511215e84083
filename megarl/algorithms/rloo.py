"""RLOO: the plain policy gradient with the other responses to the prompt as baseline (Ahmadian et al., arXiv:2402.14740)."""

from __future__ import annotations

from typing import Literal

from megarl.algorithms.groups import Baseline, GroupRelative, Scale
from megarl.algorithms.reinforce import PolicyGradient


class Rloo(PolicyGradient, GroupRelative):
    """A_i = R_i - mean of the other G - 1 rewards; loss = (1/B) sum_i sum_t -sg(r_t) A_i lp_t."""

    type: Literal["rloo"] = "rloo"

    baseline: Baseline = "leave_one_out"
    scale: Scale = "none"
