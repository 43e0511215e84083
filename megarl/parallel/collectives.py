"""Sums over process groups, for values outside the autograd graph."""

import torch.distributed as dist
from torch import Tensor

from megarl.parallel.backend import choose


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of a detached tensor over the ranks of `group`, on every rank and on the device of `value`. Collective."""
    if group.size() == 1:
        return value.detach()
    total = value.detach().to(choose().device, copy=True)  # NCCL accepts only tensors on the GPU
    dist.all_reduce(total, group=group)
    return total.to(value.device)
