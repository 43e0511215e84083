"""A value whose slope is known: the node of autograd's graph that `ops.attach` makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Attached(torch.autograd.Function):
    """Of `logp_T`, with the value and the slope that are given."""

    @staticmethod
    def forward(ctx: Any, logp_T: Tensor, value_T: Tensor, slope_T: Tensor) -> Tensor:
        ctx.save_for_backward(slope_T)
        return value_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        (slope_T,) = ctx.saved_tensors
        return grad_T * slope_T, None, None
