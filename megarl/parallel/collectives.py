"""Sums over process groups for values outside of the graph."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a detached tensor over the ranks of `group`, on each of them. Collective."""
    total = value.detach().clone()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total
