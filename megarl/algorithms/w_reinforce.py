"""W-REINFORCE: right responses weigh less than wrong ones, and neither is compared with others (Zhu et al., arXiv:2506.01347)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.reinforce import PolicyGradient
from megarl.lazy_torch import Tensor, torch


class WReinforce(PolicyGradient):
    """A_i = lambda for a right response, -1 for any other; loss = (1/B) sum_i sum_t -sg(r_t) A_i lp_t.

    That is lambda PSR + NSR, the reinforcement of right and of wrong responses: NSR alone with lambda = 0.
    """

    type: Literal["w_reinforce"] = "w_reinforce"

    kl_in: Literal["loss"] = "loss"
    """The KL is a term of the loss: of the reward only the sign is read."""
    positive_weight: NonNegativeFloat = 0.1
    """Lambda, the weight of a right response, where that of a wrong one is 1."""
    positive_above: float = 0.0
    """Responses with a reward above this count as right."""

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return torch.where(reward_N > self.positive_above, self.positive_weight, -1.0).float()
