"""From a Hugging Face config.json and our settings to Megatron's configuration and model chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import ConfigError, Layout, ModelSettings
from megarl.models.megatron_fields import check_fields
from megarl.models.rows import HeadKind
from megarl.parallel.backend import Backend
from megarl.parallel.value_head import ValueHead

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """The vocabulary rounded up to a multiple of `tp`: every tensor-parallel rank holds equally many rows."""
    return -(-vocabulary // tp) * tp


def transformer_config(hf: Mapping[str, Any], model: ModelSettings, layout: Layout, backend: Backend) -> TransformerConfig:
    """Megatron's configuration of the model that `hf` (config.json of the Qwen3-MoE family) describes.

    `model.megatron` may set any field of TransformerConfig that neither the weights nor the layout nor the gradient's scaling fix.
    Raises ConfigError for an unknown field, a fixed one, or a model feature that is not supported.
    """
    fixed = {**_architecture(hf), **_layout(layout), **_precision(model.dtype), **_laws()}
    _check_overrides(model.megatron, fixed)
    free: dict[str, Any] = {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss" if model.megatron.get("moe_aux_loss_coeff") else "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        **backend.transformer_overrides,
        **_recompute(model.recompute),
    }
    try:
        return TransformerConfig(**{**free, **model.megatron, **fixed})
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"model.megatron: refused by Megatron: {' '.join(str(error).split()) or type(error).__name__}") from error


def build_chunks(
    config: TransformerConfig, hf: Mapping[str, Any], backend: Backend, *, grad: bool, head: HeadKind = "lm"
) -> list[MegatronModule]:
    """The model chunks of this rank (one, or one for each virtual stage), on the device, their weights not yet loaded.

    grad=False builds a frozen model (reference, reward model). head="value" puts a scalar head in the place of the output layer (critic,
    reward model): the last stage then gives values [1, R, 1] in float32 instead of logits, whole on every tensor-parallel rank. Only that
    head has initial weights of its own. Requires the grid.
    """
    stages: list[int | None] = list(range(config.virtual_pipeline_model_parallel_size or 0)) or [None]
    chunks = [_chunk(config, hf, backend, stage, head) for stage in stages]
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(grad)
            # Upstream marks expert weights for the expert data-parallel group only if ep > 1 (layers.py:886,1209), although with etp != tp
            # they belong to another group just as well: gradients would silently be wrong. Marked always, the optimizer also has the
            # same two parts (dense, experts) in every layout, which resharding its state needs.
            if ".experts." in name:
                parameter.allreduce = False
            assert parameter.dtype == config.params_dtype, f"{name} is {parameter.dtype}, expected {config.params_dtype}"
    return chunks


def _chunk(config: TransformerConfig, hf: Mapping[str, Any], backend: Backend, stage: int | None, head: HeadKind) -> GPTModel:
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=backend.layer_spec(config, stage),
        vocab_size=padded_vocabulary(hf["vocab_size"], config.tensor_model_parallel_size),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=head == "lm" and bool(hf.get("tie_word_embeddings")),
        position_embedding_type="rope",
        rotary_base=rope_theta(hf),
        vp_stage=stage,
    )
    chunk.head = head  # for `weights`, on every stage
    if head == "value" and chunk.post_process:
        chunk.output_layer = ValueHead(config, chunk.pg_collection.tp)  # upstream has no way not to make its own first
    return chunk.to(backend.device)


def rope_theta(hf: Mapping[str, Any]) -> float:
    """RoPE's base, from transformers 5's `rope_parameters` or the older top-level field. Raises ConfigError for a scaled RoPE."""
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"model.path: config.json asks for RoPE of type {kind!r}; supported: 'default'")
    theta = parameters.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ConfigError("model.path: config.json has no rope_theta")
    return float(theta)


def _architecture(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What the family's rows (`families.py`) presuppose, too: no dense layers, no biases."""
    try:
        return {
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "num_attention_heads": hf["num_attention_heads"],
            "num_query_groups": hf["num_key_value_heads"],
            "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            "ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "num_moe_experts": hf["num_experts"],
            "moe_router_topk": hf["num_experts_per_tok"],
            # norm_topk_prob scales the chosen probabilities to a sum of 1, which is a softmax over the chosen logits alone.
            "moe_router_pre_softmax": not hf["norm_topk_prob"],
            "layernorm_epsilon": hf["rms_norm_eps"],
            "normalization": "RMSNorm",
            "qk_layernorm": True,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
    except KeyError as missing:
        raise ConfigError(f"model.path: config.json lacks {missing.args[0]}") from None


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "variable_seq_lengths": True,  # micro-batches differ in length; pipeline stages exchange shapes
        "batch_p2p_comm": layout.vpp is None,
        "overlap_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
    }


def _precision(dtype: str) -> dict[str, Any]:
    return {"params_dtype": DTYPES[dtype], "pipeline_dtype": DTYPES[dtype], "bf16": dtype == "bfloat16", "fp16": False}


def _laws() -> dict[str, Any]:
    return {
        # `schedule` undoes the division by micro-batches and ranks for the loss and leaves it to the MoE auxiliary losses. With True
        # their gradient depends on the layout (moe_utils.py:231 counts the tokens of one sequence-parallel shard).
        "calculate_per_token_loss": False,
        # Weights come from a checkpoint. Megatron's own initialisers still run, for the tensor-parallel attributes that they set.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "init_method": _keep,
        "output_layer_init_method": _keep,
        "embedding_init_method": _keep,
    }


def _keep(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _recompute(recompute: str) -> dict[str, Any]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": None if recompute == "none" else "selective"}


def _check_overrides(overrides: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    check_fields(overrides)
    for name in overrides:
        if name in fixed:
            raise ConfigError(f"model.megatron.{name}: set by model.path, model.dtype, layout or megarl itself (to {fixed[name]!r})")
