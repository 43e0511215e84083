"""GDPO: each part of the reward is normalised in its group before the parts are added (Liu et al., arXiv:2601.05242)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation
from megarl.lazy_torch import Tensor, torch


class Gdpo(Clipped, GroupRelative):
    """S_i = sum_k w_k (R_ik - mean_group) / (std_group + 1e-6) over the reward's parts k; A_i = (S_i - mean) / (std + 1e-6) over the step.

    The loss is GRPO's. `baseline` and `scale` say how each part is normalised.
    """

    type: Literal["gdpo"] = "gdpo"
    aggregation: Aggregation = "seq-mean-token-mean"

    needs_parts: ClassVar[bool] = True

    normalise_sum: bool = True
    """Normalise the sum over all responses of the step; false: the sum is the advantage."""

    @model_validator(mode="after")
    def _kl_is_no_part(self) -> Gdpo:
        if self.kl_in == "reward":
            raise ValueError(
                "kl_in=reward with type=gdpo: the reward's parts are normalised one by one, and the KL is none; set kl_in=loss"
            )
        return self

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        """The advantages of a reward without parts."""
        return self.part_advantages(reward_N.unsqueeze(1), torch.ones(1, dtype=torch.float64), group_N)

    def part_advantages(self, reward_NK: Tensor, weight_K: Tensor, group_N: Tensor) -> Tensor:
        part_NK = torch.stack([self.normalised(reward_N, group_N) for reward_N in reward_NK.unbind(1)], 1)
        sum_N = part_NK @ weight_K.double()
        if not self.normalise_sum:
            return sum_N.float()
        centred_N = sum_N - sum_N.mean()
        std = sum_N.std() if len(sum_N) > 1 else torch.zeros((), dtype=torch.float64)
        return (centred_N / (std + self.scale_eps)).float()
