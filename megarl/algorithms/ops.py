"""Mathematics shared by the algorithms: pure functions of tensors, each with its equation.

Axes: T predicted tokens, N sequences. Masked entries may hold any garbage; every function that meets them gives them value and
gradient exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megarl.batch import Batch

SumOver = Callable[[Tensor], Tensor]
"""Sums a detached tensor over the ranks that share the batch's sequences (context parallel); the identity on one rank."""

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlKind = Literal["k2", "k3"]


def token_weights(count_N: Tensor, aggregation: Aggregation, horizon: int | None = None) -> Tensor:
    """The weight of each loss token of a sequence, so that the batch's loss is sum_T weight * loss.

    | aggregation             | weight of a token of sequence i |
    | token-mean              | 1 / sum_j count_j               |
    | seq-mean-token-mean     | 1 / (B count_i)                 |
    | seq-mean-token-sum      | 1 / B                           |
    | seq-mean-token-sum-norm | 1 / (B horizon)                 |

    `count_N` int [N] holds the loss tokens of every sequence of the GLOBAL mini-batch; B counts those with at least one.
    Returns float64 [N]; sequences without loss tokens get 0. ValueError where nothing is left, or the horizon is missing.
    """
    used_N = count_N > 0
    sequences = int(used_N.sum())
    if sequences == 0:
        raise ValueError(f"no loss token in {len(count_N)} sequences")
    count = count_N.double()
    if aggregation == "token-mean":
        weight = torch.full_like(count, 1.0 / float(count.sum()))
    elif aggregation == "seq-mean-token-mean":
        weight = 1.0 / (sequences * count.clamp(min=1))
    elif aggregation == "seq-mean-token-sum":
        weight = torch.full_like(count, 1.0 / sequences)
    else:
        if horizon is None:
            raise ValueError("aggregation seq-mean-token-sum-norm needs a horizon (the maximum response length)")
        weight = torch.full_like(count, 1.0 / (sequences * horizon))
    return torch.where(used_N, weight, torch.zeros_like(weight))


def group_mean_std(reward_N: Tensor, group_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation (n - 1; 0 for a group of one) and size of each sequence's group, all [N], float64 inside.

    `group_N` int [N] names the group (the prompt) of each sequence; groups may be uneven and in any order.
    """
    reward = reward_N.double()
    _, index = torch.unique(group_N, return_inverse=True)
    groups = int(index.max()) + 1
    size = torch.zeros(groups, dtype=torch.float64).index_add(0, index, torch.ones_like(reward))
    mean = torch.zeros(groups, dtype=torch.float64).index_add(0, index, reward) / size
    square = torch.zeros(groups, dtype=torch.float64).index_add(0, index, (reward - mean[index]) ** 2)
    std = (square / (size - 1).clamp(min=1)).sqrt()
    return mean[index], std[index], size[index]


def group_normalised(reward_N: Tensor, group_N: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's advantage (arXiv:2402.03300, eq. 3): A_i = (R_i - mean_group) / (std_group + eps); 0 in a group of one.

    Returns float32 [N].
    """
    mean, std, _ = group_mean_std(reward_N, group_N)
    centred = reward_N.double() - mean
    # A group of equal rewards has no signal; rounding of its mean must not be blown up by 1 / eps.
    return torch.where(std > 0, centred / (std + eps), torch.zeros_like(centred)).float()


def log_ratio(logp_T: Tensor, old_T: Tensor, batch: Batch) -> Tensor:
    """d_t = lp_t - old_t at loss tokens; value and gradient 0 elsewhere."""
    return torch.where(batch.mask_T, logp_T - old_T, torch.zeros_like(logp_T))


def sequence_mean(value_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
    """Mean over all loss tokens of each sequence, wherever its tokens lie: detached [N]; 0 where there is none."""
    total_N = sum_over(batch.sequence_sum(value_T.detach()))
    return total_N / batch.count_N.clamp(min=1)


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> Tensor:
    """PPO's pessimistic surrogate (arXiv:1707.06347, eq. 7), to be minimised: max(-r A, -clip(r, 1 - low, 1 + high) A)."""
    return torch.maximum(-ratio_T * advantage_T, -ratio_T.clamp(1 - low, 1 + high) * advantage_T)


def clip_share(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Where the surrogate has lost its gradient: (on the high side with A > 0, on the low side with A < 0), float [T]."""
    return ((ratio_T > 1 + high) & (advantage_T > 0)).float(), ((ratio_T < 1 - low) & (advantage_T < 0)).float()


def kl_to_reference(logp_T: Tensor, ref_T: Tensor, batch: Batch, kind: KlKind) -> Tensor:
    """Per-token estimate of KL(pi || ref) (Schulman, 2020): k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = lp - ref.

    0 with zero gradient at masked entries.
    """
    d = log_ratio(logp_T, ref_T, batch)
    return d.square() / 2 if kind == "k2" else torch.exp(-d) - 1 + d
