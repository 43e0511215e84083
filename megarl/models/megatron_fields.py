"""The fields of Megatron's TransformerConfig, read from its source without importing Megatron, and those that megarl sets."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, Layout
from megarl.models.description import ModelDescription
from megarl.models.upstream_fields import check_values, fields_of

if TYPE_CHECKING:
    from torch import Tensor

# Fields that would turn the same weights into a different model, or need further weights. A family that has such a feature overrides them.
_ABSENT: dict[str, Any] = {
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_limited_devices": None,
    "moe_router_force_load_balancing": False,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "attention_output_gate": False,
    "linear_attention_freq": None,
    "no_rope_freq": None,
    "rotary_interleaved": False,
    "mrope_section": None,
    "qk_l2_norm": False,
    "qk_clip": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "mtp_num_layers": None,
    "use_mup": False,
    "moe_router_force_biased": None,
    "moe_router_quantile_balancing_ema": 0.0,
    "moe_expert_rank_capacity_factor": None,
    # These order or name the weights otherwise than the checkpoints here.
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
    "moe_single_grouped_weight": False,
    "moe_single_grouped_bias": False,
    "use_grouped_gemm_for_dense_mlp": False,
    "use_grouped_gemm_for_shared_expert": False,
    "use_transformer_engine_op_fuser": False,
    "is_hybrid_model": False,
    "heterogeneous_block_specs": False,
    # The stages' layers are determined by layout.pp, vpp and num_layers_in_first/last_pipeline_stage, which `check_layout` understands.
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
# Fields that Megatron reads only where a field above has another value, or in code that is not used here, by the reason. "*" ends a prefix.
_UNREAD: dict[str, tuple[str, ...]] = {
    "sparse attention is as config.json has it, where a model has it": ("dsa_*", "experimental_attention_variant_*"),
    "linear attention is as config.json has it, where a model has it": ("linear_*",),
    "Mamba mixers are as config.json has them, where a model has any": ("mamba_*", "use_mamba_mem_eff_path"),
    "multi-token prediction is not trained": ("mtp_*",),
    "use_mup is false": ("mup_*",),
    "qk_clip is false": ("qk_clip_*", "log_max_attention_logit"),
    "fp8 and fp4 are null": (
        *("fp8_*", "fp4_*", "tp_only_amax_red", "disable_parameter_transpose_cache"),
        *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    ),
    "weights come from a checkpoint": ("init_method_std", "embedding_init_method_std"),
    "Megatron's inference is not used": (
        *("inference_*", "use_inference_optimized_layers", "flash_decode", "mlp_chunks_for_prefill"),
        *("nccl_all_reduce_for_prefill", "moe_pad_experts_for_cuda_graph_inference"),
    ),
    "attention is Transformer Engine's or torch's": ("attention_softmax_in_fp32", "masked_softmax_fusion"),
    "norms are Transformer Engine's or torch's": ("persist_layer_norm", "memory_efficient_layer_norm"),
    "losses are megarl's own": ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
    "Megatron's timers are not used": ("timers", "barrier_with_L1_time"),
    "it is an object in Python": (
        *("finalize_model_grads_func", "grad_scale_func", "moe_grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        *("quant_recipe", "_cpu_offloading_context", "autocast_dtype"),
    ),
    "only Megatron's training script and data loader read it": (
        *("moe_token_dropping", "moe_per_layer_logging", "cuda_graph_use_single_mempool", "use_te_rng_tracker"),
        *("pipeline_model_parallel_comm_backend", "tp_comm_bootstrap_backend"),
        *("hierarchical_context_parallel_sizes", "max_seqlen_per_dp_cp_rank"),
    ),
}
_EXPERTS = ("moe_*", "overlap_moe_expert_parallel_comm")
_RECOMPUTED = {
    "recompute_modules": "selective",
    **dict.fromkeys(("recompute_method", "recompute_num_layers", "distribute_saved_activations"), "full"),
}
ATTENTION = ("auto", "flash", "fused", "unfused")  # Transformer Engine's backends, by their names in Megatron's AttnBackend
_SOURCES = {"transformer/transformer_config.py": ("TransformerConfig",), "model_parallel_config.py": ("ModelParallelConfig",)}


@cache
def megatron_fields() -> dict[str, Any]:
    """Return every field of TransformerConfig and its base classes, with its type; Any if YAML has no such type."""
    return fields_of("megatron.core", _SOURCES)


def best_of_group(score_function: str | None) -> int:
    """Return of how many of its experts, the best ones, a group's score is the sum, by the router's score function.

    The two best in DeepSeek-V3 and the others with sigmoid routers, the best in DeepSeek-V2.
    """
    return 1 if score_function == "softmax" else 2


def check_fields(overrides: Mapping[str, Any], fixed: Mapping[str, Any], recompute: str) -> None:
    """Raise ConfigError for invalid keys or values of `model.megatron`.

    These are keys that are no field (the message has the nearest name), that are in `fixed` (see `fixed_fields`) or that change nothing,
    and values whose type is not Megatron's. A field that changes nothing because of others in `model.megatron`, or because ranks run on
    CPUs, is allowed.

    Args:
        overrides: `model.megatron`.
        fixed: the result of `fixed_fields`.
        recompute: `model.recompute`.
    """
    attention = overrides.get("attention_backend", "auto")
    if attention not in ATTENTION:
        raise ConfigError(f"model.megatron.attention_backend: {attention!r} is none of {', '.join(ATTENTION)}")
    groups, topk = fixed.get("moe_router_group_topk"), fixed.get("moe_router_topk", 0)
    best = best_of_group(fixed.get("moe_router_score_function"))
    if overrides.get("moe_router_fusion") and groups and topk // groups != best:
        raise ConfigError(
            f"model.megatron.moe_router_fusion=True: Transformer Engine scores a group by num_experts_per_tok//topk_group={topk}//{groups} "
            f"best experts, and the model by {best}"
        )
    if overrides.get("moe_router_fusion") and fixed.get("moe_router_enable_expert_bias") and best == 1:
        raise ConfigError("model.megatron.moe_router_fusion=True: Transformer Engine knows no bias of a softmax router")
    if overrides:
        owned = unread(fixed, recompute)
        owned |= {name: f"set by model.path, model.dtype, layout or megarl itself (to {value!r})" for name, value in fixed.items()}
        owned["recompute_granularity"] = "set by model.recompute"
        check_values("model.megatron", overrides, megatron_fields(), owned, "Megatron's TransformerConfig")


def unread(fixed: Mapping[str, Any], recompute: str) -> dict[str, str]:
    """Return the fields that change nothing in a model with these `fixed` fields and this `model.recompute`, each with the reason."""
    reasons = {pattern: reason for reason, patterns in _UNREAD.items() for pattern in patterns}
    if fixed["num_moe_experts"] is None:
        reasons |= dict.fromkeys(_EXPERTS, "the model has no experts")
    reasons |= {name: f"model.recompute is {recompute}, not {kind}" for name, kind in _RECOMPUTED.items() if kind != recompute}
    names = {name: reason for pattern, reason in reasons.items() for name in fnmatch.filter(megatron_fields(), pattern)}
    return {name: f"has no effect: {reason}" for name, reason in names.items()}


def fixed_fields(model: ModelDescription, dtype: str, layout: Layout) -> dict[str, Any]:
    """Return the fields that are determined by the weights, their dtype, the layout and the scaling of the gradient.

    Args:
        model: the model.
        dtype: "float32" or "bfloat16".
        layout: the layout of the ranks.

    Returns:
        Name -> value, for Megatron's (MLA)TransformerConfig; torch's dtypes and activation functions are given by name.

    Raises:
        ConfigError: the family does not support this config.json.
    """
    return {**_ABSENT, **model.fields, **_layout(layout), **_precision(dtype), **_laws()}


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "tensor_parallel_num_weight_shards": None,
        "gtp_weight_remat_size": 1,
        "expert_tensor_parallel_num_weight_shards": None,
        "expert_gtp_weight_remat_size": 1,
        "variable_seq_lengths": True,  # micro-batches differ in length; pipeline stages exchange shapes
        "batch_p2p_comm": layout.vpp is None,
        "overlap_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
    }


def _precision(dtype: str) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == "bfloat16",
        "fp16": False,
        # FP8 and FP4 layers need row counts in multiples of eight or more, and keep scales that checkpoints here do not store.
        "fp8": None,
        "fp8_param": False,
        "fp4": None,
        "fp4_param": False,
        "fp8_output_proj": False,
    }


def _laws() -> dict[str, Any]:
    return {
        # `schedule` undoes the division by micro-batches and ranks for the loss, but keeps it for the MoE auxiliary losses. With True,
        # their gradient would depend on the layout (moe_utils.py:279 counts the tokens of one sequence-parallel shard).
        "calculate_per_token_loss": False,
        "defer_embedding_wgrad_compute": False,  # needs apex's CUDA extension (megatron/core/utils.py:1279)
        # Weights come from a checkpoint. Megatron's own initialisers still run, for the tensor-parallel attributes that they set.
        "perform_initialization": True,
        "use_cpu_initialization": False,
        "init_method": _keep,
        "output_layer_init_method": _keep,
        "embedding_init_method": _keep,
    }


def _keep(weight: Tensor) -> Tensor:
    return weight
