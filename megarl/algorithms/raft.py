"""RAFT: supervised training on the best of the policy's own responses (Dong et al., arXiv:2304.06767)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from megarl.algorithms.base import PolicyAlgorithm
from megarl.algorithms.ops import Aggregation, Block, Term
from megarl.lazy_torch import Tensor, torch


class Raft(PolicyAlgorithm):
    """Keeps the best responses to each prompt (the first in a tie) among those with R > threshold; loss = mean NLL of the kept tokens,
    with `weight: reward` each times its response's reward.

    With rewards 0 and 1, `threshold: 0` and `best: 1` imitate one right response per prompt, and nothing if there is none.
    """

    reads_advantages: ClassVar[bool] = False

    type: Literal["raft"] = "raft"
    aggregation: Aggregation = "token-mean"

    best: PositiveInt | None = None
    """Largest number of responses to keep per prompt; null: 1, or, with a threshold, all above it."""
    threshold: float | None = None
    """Keep only responses with a reward above this; null: no threshold."""
    weight: Literal["one", "reward"] = "one"
    """The weight of a kept response: 1, or its reward."""

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        """The weights of the responses."""
        return torch.ones(len(reward_N)) if self.weight == "one" else reward_N.float()

    def keep(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        above_N = torch.ones_like(group_N, dtype=torch.bool) if self.threshold is None else reward_N > self.threshold
        if self.best is None and self.threshold is not None:
            return above_N
        kept_N, taken = torch.zeros_like(above_N), dict[int, int]()
        for n in torch.argsort(reward_N, descending=True, stable=True).tolist():
            group = int(group_N[n])
            taken[group] = taken.get(group, 0) + 1
            kept_N[n] = taken[group] <= (self.best or 1)
        return kept_N & above_N

    def policy_term(self, block: Block) -> Term:
        slope_T = torch.full_like(block.lp_T, -1.0) if self.weight == "one" else -block.advantage_T
        return Term(slope_T * block.lp_T, slope_T)
