"""RAFT: supervised training on the best of the policy's own responses (Dong et al., arXiv:2304.06767)."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from megarl.algorithms.base import PolicyAlgorithm
from megarl.algorithms.ops import Aggregation, Block, Term


class Raft(PolicyAlgorithm):
    """Keeps the best response to each prompt (the first of equals), or all with R > threshold; loss = mean NLL of the kept tokens."""

    type: Literal["raft"] = "raft"
    aggregation: ClassVar[Aggregation] = "token-mean"

    threshold: float | None = None
    """Keep all responses with a reward above this; null: the best response to each prompt."""

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        """1: what is kept counts alike."""
        return torch.ones(len(reward_N))

    def keep(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        if self.threshold is not None:
            return reward_N > self.threshold
        best: dict[int, int] = {}
        for n, (reward, group) in enumerate(zip(reward_N.tolist(), group_N.tolist(), strict=True)):
            if group not in best or reward > float(reward_N[best[group]]):
                best[group] = n
        return torch.zeros_like(group_N, dtype=torch.bool).index_fill(0, torch.tensor(list(best.values()), dtype=torch.int64), True)

    def policy_term(self, block: Block) -> Term:
        return Term(-block.lp_T, torch.full_like(block.lp_T, -1.0))
