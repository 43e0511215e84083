"""Sums over process groups for values outside of the graph."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megarl.parallel.backend import choose


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a detached tensor over the ranks of `group`, on each of them and where `value` lies. Collective."""
    if group.size() == 1:
        return value.detach()
    total = value.detach().to(choose().device, copy=True)  # NCCL takes tensors on the GPU alone
    dist.all_reduce(total, group=group)
    return total.to(value.device)
