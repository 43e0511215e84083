"""Advantages relative to the other responses to a prompt: subtract a baseline, divide by a scale.

Axes: N sequences. All arithmetic is in float64; a NaN reward makes its whole group NaN.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from megarl.algorithms.base import PolicyAlgorithm
from megarl.lazy_torch import Tensor, torch

Baseline = Annotated[
    Literal["group", "leave_one_out"], Field(description="Subtracted from a reward: the mean of its group, or of the other rewards in it.")
]
Scale = Annotated[
    Literal["none", "group", "batch", "others", "group_population", "batch_centred", "mean"],
    Field(
        description="By what centred rewards are divided: the standard deviation (n - 1) of the group's rewards (group), of the other "
        "responses' (others; where it is 0, no division), of the step's (batch), of the step's centred ones (batch_centred); that of the "
        "group with n (group_population); or the group's mean (mean; an advantage is 0 if it is not above 0). none: no division."
    ),
]


class GroupRelative(PolicyAlgorithm):
    """A_i = (R_i - baseline) / (std + scale_eps), without the division where `scale` is none."""

    baseline: Baseline = "group"
    scale: Scale = "group"
    scale_eps: PositiveFloat = 1e-6
    """Added to what `scale` divides by."""

    @property
    def min_group(self) -> int:
        return 2

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        return self.normalised(reward_N, group_N).float()

    def normalised(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        """Centred rewards over their scale, float64 [N]."""
        centred_N = (group_centred if self.baseline == "group" else leave_one_out)(reward_N, group_N)
        if self.scale == "none":
            return centred_N
        mean_N, std_N, size_N = group_mean_std(reward_N, group_N)
        if self.scale == "mean":
            return torch.where(mean_N > 0, centred_N / (mean_N + self.scale_eps), 0 * mean_N)
        if self.scale == "group_population":
            std_N = std_N * ((size_N - 1) / size_N).sqrt()
        elif self.scale == "others":
            std_N = std_of_others(reward_N, group_N)
            return torch.where(std_N == 0, centred_N, centred_N / (std_N + self.scale_eps))
        elif self.scale != "group":
            std_N = batch_std(reward_N if self.scale == "batch" else centred_N)
        return centred_N / (std_N + self.scale_eps)


def group_mean_std(reward_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation (n - 1; 0 for a group of one) and size of each sequence's group, all float64 [N].

    `group_N` int [N] names the group (the prompt) of each sequence; groups may be uneven and in any order.
    """
    reward = reward_N.double()
    names, index = torch.unique(group_N, return_inverse=True)
    zero = torch.zeros(len(names), dtype=torch.float64)
    size = zero.index_add(0, index, torch.ones_like(reward))
    mean = zero.index_add(0, index, reward) / size
    square = zero.index_add(0, index, (reward - mean[index]) ** 2)
    low, high = (zero.scatter_reduce(0, index, reward, how, include_self=False) for how in ("amin", "amax"))
    std = torch.where(low == high, 0.0, (square / (size - 1).clamp(min=1)).sqrt())  # a mean of equal numbers may be rounded
    return mean[index], std[index], size[index]


def group_centred(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """Dr.GRPO's advantage (arXiv:2503.20783): A_i = R_i - mean_group, float64 [N]; exactly 0 in a group of equal rewards."""
    mean, std, _ = group_mean_std(reward_N, group_N)
    return torch.where(std == 0, torch.zeros_like(mean), reward_N.double() - mean)


def leave_one_out(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """RLOO's advantage (arXiv:2402.14740, eq. 8): A_i = R_i - mean of the other G - 1 rewards = (R_i - mean_group) G / (G - 1).

    Returns float64 [N]; 0 in a group of one.
    """
    size = group_mean_std(reward_N, group_N)[2]
    return group_centred(reward_N, group_N) * size / (size - 1).clamp(min=1)


def std_of_others(reward_N: Tensor, group_N: Tensor) -> Tensor:
    """The standard deviation (n - 1) of the other rewards of each response's group, float64 [N]; 0 where there are fewer than two others.

    Their squares about their own mean are S - (R - mean)^2 G / (G - 1), with S the group's; they are summed directly, since the difference
    would not be exactly 0 for equal rewards.
    """
    reward, std_N = reward_N.double(), torch.zeros(len(reward_N), dtype=torch.float64)
    for group in torch.unique(group_N):
        member_M = (group_N == group).nonzero().squeeze(1)
        if len(member_M) > 2:
            others = reward[member_M].expand(len(member_M), -1)[~torch.eye(len(member_M), dtype=torch.bool)].view(len(member_M), -1)
            same = (others == others[:, :1]).all(1)
            std_N[member_M] = others.std(1).masked_fill(same, 0.0)
    return std_N


def batch_std(value_N: Tensor) -> Tensor:
    """The standard deviation (n - 1) of all values, float64, 0-dim; 0 for a single value."""
    return value_N.double().std() if len(value_N) > 1 else torch.zeros((), dtype=torch.float64)
