"""Which weights CPU engines pack for their kernels, and what is left in the place of those that they have packed.

Only vLLM's own processes import this file.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from megarl.upstream.expect import expect


def install() -> None:
    """Leave the weights of convolutions as they are loaded, and an empty weight of its own dtype where a matrix has been packed.

    vLLM 0.30.0 packs a convolution's weights in place (layers/utils.py:474), which a reload of other weights does not survive. In the place
    of a packed matrix it leaves an empty tensor of the model's dtype (:520, :555). To its dtype GateLinear brings a router's input
    (fused_moe/router/gate_linear.py:204): in a bfloat16 model with a float32 router (Nemotron-H) the kernel then reads bfloat16 values,
    and what lies behind them, as float32.
    """
    dispatch = utils.dispatch_cpu_unquantized_gemm
    expect(
        dispatch,
        "layer.weight.ndim != 2:",
        "layer.weight.data = ops.causal_conv1d_weight_pack(unpacked)",
        "layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)",
    )
    expect(GateLinear.forward, "x.dtype != self.weight.dtype:", "x = x.to(self.weight.dtype)")

    def dispatch_matrices(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim == 2:
            dispatch(layer, remove_weight)
            if not weight.is_meta and not layer.weight.numel():
                layer.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch_matrices
