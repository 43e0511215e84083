"""Layers with the interfaces of Transformer Engine's, made of Megatron's local ones, in the places where Megatron and megarl find those.

The specs are Megatron's own for Transformer Engine, and so is the module of grouped experts, TEGroupedMLP.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megarl.parallel.attention import PackedAttention
from megarl.parallel.spec import ReplicatedLinear, RMSNorm


class Norm(RMSNorm):
    """TENorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, has_residual: bool = False) -> None:
        super().__init__(config, hidden_size, eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """TELayerNormColumnParallelLinear: what hooks see of its input is not normalised."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = config.layernorm_epsilon

    def forward(self, x: Tensor, *rest: Any, **options: Any) -> Any:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps), *rest, **options)


class GroupedLinear(torch.nn.Module):
    """TEGroupedLinear: the weights of this rank's experts, for rows that are sorted by expert."""

    column: bool

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, bias: bool, **_: Any) -> None:
        super().__init__()
        assert not bias
        shards = pg_collection.expt_tp.size()
        rows, columns = (output_size // shards, input_size) if self.column else (output_size, input_size // shards)
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype)))

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        parts = zip(x.split(m_splits), self.parameters(), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None


class ColumnParallelGroupedLinear(GroupedLinear):
    column = True


class RowParallelGroupedLinear(GroupedLinear):
    column = False


def install(backend: Any) -> None:
    """Put them in their places, in a rank of its own, whose backend then builds models from them."""
    places = {
        "TENorm": Norm,
        "TELinear": ReplicatedLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
        "TEColumnParallelGroupedLinear": ColumnParallelGroupedLinear,
        "TERowParallelGroupedLinear": RowParallelGroupedLinear,
        "TEDotProductAttention": PackedAttention,
    }
    fields = {**backend.transformer_overrides, "moe_grouped_gemm": True}  # without the other kernels
    type(backend).transformer_overrides, backend.fused = fields, True
    for name, layer in places.items():
        for module in (transformer_engine, provider):
            setattr(module, name, layer)
    provider.is_te_min_version = lambda *_, **__: True
    gpt_layer_specs.TESpecProvider, gpt_layer_specs.TENorm = provider.TESpecProvider, Norm
