"""The modules that Megatron builds a layer from: Transformer Engine's, or Megatron's own with our norm and attention."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megarl.models.sizes import ATTENTION, MAMBA
from megarl.parallel.attention import PackedAttention


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (or 1 + weight, in float32), usable under sequence parallelism.

    Megatron's WrappedTorchNorm refuses sequence parallelism (torch_norm.py:50) only because nobody marks its weight for the
    gradient reduction over the tensor-parallel group; this class does.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.centred = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.centred, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        if not self.centred:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


def _uncentred(config: TransformerConfig) -> TransformerConfig:
    """The configuration of a norm whose weight is 1 where it does nothing, whatever the model's other norms have."""
    config = copy.copy(config)
    config.layernorm_zero_centered_gamma = False
    return config


class UncentredRMSNorm(RMSNorm):
    """An RMSNorm that scales by its weight where the model's others scale by 1 + weight: a gated delta net's own."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(_uncentred(config), hidden_size, eps)


class UncentredTENorm:
    """Transformer Engine's, as `UncentredRMSNorm`."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        """Create Transformer Engine's module."""
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm(_uncentred(config), hidden_size, eps)


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


def transformer_engine(
    config: TransformerConfig, vp_stage: int | None, torch_attention: bool, delta_net: type, *, adapted: bool
) -> TransformerBlockSubmodules:
    """The Transformer Engine spec for the layers that this pipeline rank builds for the given virtual stage.

    Args:
        config: the model's configuration.
        vp_stage: the virtual stage.
        torch_attention: whether `PackedAttention` takes the place of Transformer Engine's attention. It does in any case for sinks, which
            Transformer Engine has for packed sequences from cuDNN 9.18 on, without context parallelism (2.18, utils.py:1028-1060), and
            where ranks share sequences with sliding windows, which it has not in the ring of keys and values that Megatron asks for by
            default (context_parallel.py:5057).
        delta_net: the module of gated delta nets.
        adapted: norms stand before linear layers, and not in them: adapters see what these are given.
    """
    block = get_gpt_decoder_block_spec(_of_attention(config), use_transformer_engine=True, vp_stage=vp_stage)
    shared_windows = config.window_size is not None and config.context_parallel_size > 1
    for layer in block.layer_specs if torch_attention or shared_windows or config.softmax_type != "vanilla" else []:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    for layer in block.layer_specs if adapted else []:
        _separate_norms(layer)
    if config.experimental_attention_variant == "gated_delta_net":
        from megatron.core.extensions import transformer_engine as te

        projection = te.TEColumnParallelLinear if adapted else te.TELayerNormColumnParallelLinear
        parts = GatedDeltaNetSubmodules(projection, UncentredTENorm, te.TERowParallelLinear)
        _put_delta_nets(block, config, vp_stage, ModuleSpec(delta_net, submodules=parts))
    return block


def local(config: TransformerConfig, vp_stage: int | None, delta_net: type) -> TransformerBlockSubmodules:
    """The local spec for the layers that this pipeline rank builds for the given virtual stage.

    Args:
        config: the model's configuration.
        vp_stage: the virtual stage.
        delta_net: the module of gated delta nets.
    """
    block = get_gpt_decoder_block_spec(_of_attention(config), use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in block.layer_specs:
        _localise(layer, config)
    block.layer_norm = RMSNorm
    if config.experimental_attention_variant == "gated_delta_net":
        parts = GatedDeltaNetSubmodules(ColumnParallelLinear, UncentredRMSNorm, RowParallelLinear)
        _put_delta_nets(block, config, vp_stage, ModuleSpec(delta_net, submodules=parts))
    return block


def _separate_norms(layer: ModuleSpec) -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELayerNormColumnParallelLinear, TENorm

    parts, attention, mlp = layer.submodules, layer.submodules.self_attention.submodules, layer.submodules.mlp.keywords["submodules"]
    for owner, norm, holder, linear in (
        (parts, "input_layernorm", attention, "linear_qkv"),
        (attention, "q_layernorm", attention, "linear_q_up_proj"),
        (attention, "kv_layernorm", attention, "linear_kv_up_proj"),
        (parts, "pre_mlp_layernorm", mlp, "linear_fc1"),
    ):
        if getattr(holder, linear, None) is TELayerNormColumnParallelLinear:
            setattr(owner, norm, TENorm)
            setattr(holder, linear, TEColumnParallelLinear)


def _of_attention(config: TransformerConfig) -> TransformerConfig:
    """The configuration without its gated delta nets, which Megatron's spec of a block refuses (gpt_layer_specs.py:572)."""
    config = copy.copy(config)
    config.experimental_attention_variant = None
    return config


def _put_delta_nets(block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None, delta_net: ModuleSpec) -> None:
    """Replace the attention of those layers of a block that are gated delta nets by `linear_attention_freq`."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for index, layer in enumerate(block.layer_specs):
        if config.linear_attention_freq[first + index]:
            block.layer_specs[index] = replace(layer, submodules=replace(layer.submodules, self_attention=delta_net))


def one_block(layer: ModuleSpec, kind: str, mamba: type, *, fused: bool) -> ModuleSpec:
    """Return a layer of one part alone (`Sizes.blocks`), with the norm before it and the sum with its input after it.

    Args:
        layer: the ModuleSpec of a layer with attention and MLP, which others may share.
        kind: the layer's kind.
        mamba: the module of Mamba mixers, which stand in the place of attention.
        fused: the layers are Transformer Engine's, whose norm is a part of the projection after it.
    """
    no_attention = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
    no_mlp = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    parts = replace(layer.submodules, **(no_mlp if kind in (MAMBA, ATTENTION) else no_attention))
    if kind == MAMBA and fused:
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear

        parts.input_layernorm = IdentityOp
        parts.self_attention = ModuleSpec(mamba, submodules=MambaMixerSubmodules(TELayerNormColumnParallelLinear, TERowParallelLinear))
    elif kind == MAMBA:
        parts.self_attention = ModuleSpec(mamba, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    return replace(layer, submodules=parts)


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


def scale_residuals(layer: ModuleSpec, factor: float) -> None:
    """Let a layer's attention and MLP add their outputs to the residual stream times a factor."""
    if factor == 1.0:
        return

    def addition(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = get_bias_dropout_add(training, fused)

        def scaled(outputs: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            x, bias = outputs
            return add((x * factor, None if bias is None else bias * factor), residual, dropout)

        return scaled

    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = addition
