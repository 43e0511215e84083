"""OPO: on-policy training with the baseline of least variance, the group's mean weighted by length (Hao et al., arXiv:2505.23585)."""

from __future__ import annotations

from typing import ClassVar, Literal

from megarl.algorithms.groups import group_centred
from megarl.algorithms.reinforce import PolicyGradient
from megarl.lazy_torch import Tensor, torch


class Opo(PolicyGradient):
    """A_i = R_i - b with b = sum_j |o_j| R_j / sum_j |o_j| over the group; loss = (1/B) sum_i sum_t -sg(r_t) A_i lp_t.

    b has the least variance where tokens' gradients are orthogonal and of one norm. |o_j| counts loss tokens: a response that the loss
    leaves out does not move b. The paper's exact on-policy training is `train.mini_batches: 1`.
    """

    type: Literal["opo"] = "opo"

    needs_lengths: ClassVar[bool] = True

    @property
    def min_group(self) -> int:
        return 2

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        """The advantages of responses of one length."""
        return self.length_advantages(reward_N, group_N, torch.ones_like(group_N))

    def length_advantages(self, reward_N: Tensor, group_N: Tensor, count_N: Tensor) -> Tensor:
        centred_N, names_N = group_centred(reward_N, group_N), torch.unique(group_N, return_inverse=True)[1]  # exactly 0 if all are equal
        zero_N = torch.zeros_like(centred_N)
        sum_N = zero_N.index_add(0, names_N, count_N * centred_N)
        size_N = zero_N.index_add(0, names_N, count_N.double()).clamp(min=1)
        return (centred_N - (sum_N / size_N)[names_N]).float()
