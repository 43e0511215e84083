"""Block-wise fp8 on any CPU: vLLM 0.30.0's own CPU kernels need AMX, and leave activations in bfloat16.

These compute what its GPU kernels do (CUTLASS, Triton): the inputs are quantised to e4m3 with a scale for every token and 128 columns, and
the products of quantised inputs and weights are added up in float32. So the gap between an fp8 engine and its trainer is that of a GPU
engine, up to the order of summation. Values times scales are multiplied in float32, which rounds 2^20 times less than e4m3 does.

Only vLLM's own processes import this file. Axes: T tokens, O output rows, C input columns, J blocks of columns, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from megarl.models.weight_map import FP8_BLOCK
from megarl.sync.quantize import LARGEST, dequantize
from megarl.upstream.expect import expect

_MIN = 1e-10  # least largest element of a quantised group (vllm/model_executor/layers/quantization/utils/fp8_utils.py:557)


def install() -> None:
    """Give CPU engines these kernels, and let them compute in float32. Raises RuntimeError if vLLM's own places for them have changed."""
    if kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] == [TorchBlockLinear]:
        return
    # vllm/model_executor/kernels/linear/__init__.py:472
    if kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] != [kernels.CPUFp8BlockScaledMMKernel]:
        raise RuntimeError("vLLM's kernels for block-wise fp8 on a CPU are not those of 0.30.0: megarl's patch must be reviewed")
    # vllm/model_executor/layers/fused_moe/oracle/fp8.py:246 and :474 import these two when they need them.
    expect(oracle.backend_to_kernel_cls, "experts.cpu_moe import (", "CPUExpertsFp8,", "return [CPUExpertsFp8]")
    expect(oracle.convert_to_fp8_moe_kernel_format, "experts.cpu_moe import (", "w13, w2 = prepare_fp8_moe_layer_for_cpu(w13, w2)")
    # vllm/model_executor/layers/quantization/fp8.py:158: the kernels of GPUs return no float32.
    expect(Fp8Config.get_supported_act_dtypes, "return [torch.bfloat16, torch.half]")
    kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [TorchBlockLinear]
    cpu_moe.CPUExpertsFp8 = TorchBlockExperts
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.bfloat16, torch.half, torch.float32])


class TorchBlockLinear(Fp8BlockScaledMMLinearKernel):
    """A linear layer with a block-wise quantised weight."""

    apply_input_quant = False  # `product` does it

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return current_platform.is_cpu(), "requires CPU."

    def process_weights_after_loading(self, layer: Any) -> None:
        """The weight stays as it was loaded."""

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """Multiply.

        Args:
            A: the inputs, not quantised.
            B: the weight's values.
            As: not used.
            Bs: the weight's scales.
        """
        return product(A, B, Bs)


class TorchBlockExperts(cpu_moe.CPUExpertsFp8):
    """The experts of one layer, one after another."""

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_cpu())

    def supports_expert_map(self) -> bool:
        return True

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Each product is rounded to the model's dtype where the GPU kernels store it, and a token's experts are added up in float32."""
        if apply_router_weight_on_input:
            raise NotImplementedError("fp8 experts on a CPU do not weight their inputs")
        dtype, sum_TO = hidden_states.dtype, torch.zeros(hidden_states.shape, dtype=torch.float32)
        expert_TK = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]  # -1: on another worker
        for expert in expert_TK.unique().tolist():
            if expert < 0:
                continue
            token, slot = (expert_TK == expert).nonzero(as_tuple=True)
            gate, up = product(hidden_states[token], w1[expert], self.w1_scale[expert]).to(dtype).float().chunk(2, -1)
            inner = (silu(gate) * up).to(dtype)
            down = product(inner, w2[expert], self.w2_scale[expert]) * topk_weights[token, slot, None].float()
            sum_TO.index_add_(0, token, down.to(dtype).float())
        output.copy_(sum_TO)


def product(input_TC: Tensor, weight_OC: Tensor, scale_IJ: Tensor) -> Tensor:
    """Return the product [T, O] of quantised inputs and quantised weights, in float32.

    Args:
        input_TC: not quantised.
        weight_OC: e4m3 values.
        scale_IJ: their scales, float32.
    """
    return linear(dequantized_inputs(input_TC), dequantize(weight_OC, scale_IJ))


def dequantized_inputs(input_TC: Tensor) -> Tensor:
    """Quantise each token's inputs to e4m3 in groups of 128 columns, scale = max(max|x|, 1e-10) / 448, and return values * scales."""
    tokens, columns = input_TC.shape
    group_TJC = pad(input_TC.float(), (0, -columns % FP8_BLOCK)).view(tokens, -1, FP8_BLOCK)
    scale_TJ = group_TJC.abs().amax(-1, keepdim=True).clamp_(min=_MIN) / LARGEST
    value_TJC = (group_TJC / scale_TJ).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (value_TJC.float() * scale_TJ).view(tokens, -1)[:, :columns]
