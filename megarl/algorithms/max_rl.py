"""MaxRL: advantages that approach maximum likelihood as more responses are sampled (arXiv:2602.02710)."""

from typing import Literal

from megarl.algorithms.groups import GroupRelative, Scale
from megarl.algorithms.reinforce import PolicyGradient


class MaxRl(PolicyGradient, GroupRelative):
    """A_i = (R_i - mean_group) / (mean_group + 1e-6), 0 where the mean is not above 0; loss = (1/B) sum_i sum_t -sg(r_t) A_i lp_t.

    With rewards 0 and 1 and K right responses, that is the mean of grad log pi over the right ones less the mean over all.
    """

    type: Literal["max_rl"] = "max_rl"

    scale: Scale = "mean"
