"""ReMax: the plain policy gradient with the greedy response's reward as baseline (Li et al., arXiv:2310.10505)."""

from __future__ import annotations

from typing import ClassVar, Literal

from megarl.algorithms.reinforce import PolicyGradient
from megarl.lazy_torch import Tensor


class Remax(PolicyGradient):
    """A_i = R_i - R_greedy(q); loss = (1/B) sum_i sum_t -sg(r_t) A_i lp_t."""

    type: Literal["remax"] = "remax"
    needs_greedy: ClassVar[bool] = True

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        assert greedy_N is not None, "ReMax needs the rewards of the greedy responses"
        return (reward_N.double() - greedy_N.double()).float()
