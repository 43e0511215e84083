"""A value with a known slope: the autograd node that `ops.attach` creates."""

from typing import Any

import torch
from torch import Tensor


class Attached(torch.autograd.Function):
    """A function of `logp_T` with a given value and slope."""

    @staticmethod
    def forward(ctx: Any, logp_T: Tensor, value_T: Tensor, slope_T: Tensor) -> Tensor:
        ctx.save_for_backward(slope_T)
        return value_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None]:
        (slope_T,) = ctx.saved_tensors
        return grad_T * slope_T, None, None
