"""The modules that Megatron builds a layer from: Transformer Engine's, or Megatron's own with our norm and attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.parallel.attention import PackedAttention


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, usable under sequence parallelism.

    Megatron's WrappedTorchNorm refuses sequence parallelism (torch_norm.py:50) only because nobody marks its weight for the
    gradient reduction over the tensor-parallel group; this class does.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ReplicatedLinear(torch.nn.Module):
    """x W^T with all of W on every tensor-parallel rank: the projections of multi-latent attention down to its latents.

    Megatron's local spec shards them by column and gathers the result, which loses gradients of the shared rotary key: the gather's
    backward takes this rank's slice (multi_latent_attention.py:739) of a gradient of which each rank has only its own heads' part.
    Transformer Engine's spec has the whole projection, as here. The arguments are those of Transformer Engine's TELinear, in whose place
    `upstream.py` puts this class without Transformer Engine.
    """

    def __init__(self, input_size: int, output_size: int, *, parallel_mode: str, config: TransformerConfig, bias: bool, **_: Any) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not bias
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed over the shards

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Project this rank's tokens; the bias is None."""
        return F.linear(x, self.weight), None


def transformer_engine(config: TransformerConfig, vp_stage: int | None, torch_attention: bool) -> TransformerBlockSubmodules:
    """The Transformer Engine spec for the layers that this pipeline rank builds for the given virtual stage.

    Args:
        config: the model's configuration.
        vp_stage: the virtual stage.
        torch_attention: whether `PackedAttention` takes the place of Transformer Engine's attention. It does in any case for sinks, which
            Transformer Engine has for packed sequences from cuDNN 9.18 on, without context parallelism (2.18, utils.py:1028-1060), and
            where ranks share sequences with sliding windows, which it has not in the ring of keys and values that Megatron asks for by
            default (context_parallel.py:5057).
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    shared_windows = config.window_size is not None and config.context_parallel_size > 1
    for layer in block.layer_specs if torch_attention or shared_windows or config.softmax_type != "vanilla" else []:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return block


def local(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The local spec for the layers that this pipeline rank builds for the given virtual stage."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in block.layer_specs:
        _localise(layer, config)
    block.layer_norm = RMSNorm
    return block


def _localise(layer: ModuleSpec, config: TransformerConfig) -> None:
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    # Upstream renames the norms in checkpoints to Transformer Engine's names; `sharded.model_state` does so for every spec.
    parts.sharded_state_dict_keys_map = {}
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm and config.multi_latent_attention:
        attention.kv_layernorm = RMSNorm
        if config.q_lora_rank is not None:
            attention.q_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
