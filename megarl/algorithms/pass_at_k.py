"""Pass@k training: a response is worth what the best of k reaches with it (arXiv:2508.10751; arXiv:2505.15201, PKPO)."""

from __future__ import annotations

from math import comb
from typing import Annotated, Literal

from pydantic import Field

from megarl.algorithms.clipped import Clipped
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation
from megarl.lazy_torch import Tensor, torch


class PassAtK(Clipped, GroupRelative):
    """With M_S the largest reward in a subset S of k of a group's G responses, and averages over all subsets,

        A_i = (mean_{S containing i} M_S - mean_S M_S) / (std_S M_S + 1e-6)          by default,
        A_i = mean_{S containing i} (M_S - M_{S without i})                          with baseline=leave_one_out, scale=none.

    For rewards 0 and 1 the first is Pass@k training's; the second is G / k times PKPO's s_i^(loo-1), so that the mean of A_i grad lp_i over
    the group is the unbiased gradient of the expected maximum of k, over k. The loss is GRPO's. k = 1 would be GRPO itself.
    """

    type: Literal["pass_at_k"] = "pass_at_k"
    aggregation: Aggregation = "seq-mean-token-mean"

    k: Annotated[int, Field(ge=2)] = 4
    """The responses of a subset, fewer than `rollout.samples_per_prompt`."""
    baseline: Annotated[
        Literal["group", "leave_one_out"],
        Field(description="Subtracted from the best of a response's subset: the mean over all subsets, or the best of the others in it."),
    ] = "group"
    scale: Annotated[
        Literal["none", "group"],
        Field(description="Divide by the standard deviation of the best over all subsets of the group (group), or do not (none)."),
    ] = "group"

    @property
    def min_group(self) -> int:
        """One more than k: all responses of a smaller group have the same subset."""
        return self.k + 1

    def normalised(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        advantage_N = torch.zeros(len(reward_N), dtype=torch.float64)
        for group in torch.unique(group_N):
            member_M = group_N == group
            advantage_N[member_M] = self._of_group(reward_N[member_M].double())
        return advantage_N

    def _of_group(self, reward_M: Tensor) -> Tensor:
        """The advantages of one group: the best of a subset is the last of its places in the order of the rewards."""
        size, k = len(reward_M), self.k
        if size <= k:
            return 0 * reward_M
        sorted_M, order_M = reward_M.sort(stable=True)
        sorted_M = sorted_M - sorted_M[0]  # the advantages of equal rewards are exactly 0
        last_M = _chances(range(size), k - 1, comb(size, k))
        mean = last_M @ sorted_M
        own_M = _chances(range(size), k - 1, comb(size - 1, k - 1)) * sorted_M
        if self.baseline == "group":
            above_M = _chances(range(-1, size - 1), k - 2, comb(size - 1, k - 1)) * sorted_M
            centred_M = own_M + above_M.flip(0).cumsum(0).flip(0) - above_M - mean
        else:
            below_M = _chances(range(size), k - 2, comb(size - 1, k - 1)) * sorted_M
            centred_M = own_M - below_M.cumsum(0) + below_M + 0 * mean  # which a reward that is no number makes NaN
        if self.scale == "group":
            centred_M = centred_M / ((last_M @ (sorted_M - mean) ** 2).sqrt() + self.scale_eps)
        return torch.empty_like(centred_M).scatter(0, order_M, centred_M)


def _chances(lower: range, others: int, subsets: int) -> Tensor:
    """The share of `subsets` in which a place is the last, float64: its `others` are chosen from the places of `lower` below it."""
    return torch.tensor([comb(places, others) / subsets if places >= 0 else 0.0 for places in lower], dtype=torch.float64)
