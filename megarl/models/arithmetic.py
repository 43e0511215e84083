"""What config.json says of a model's arithmetic beside the shapes of its tensors: two models of the same shapes may compute differently."""

from typing import Any

from megarl.models.decoder import FULL, SLIDING
from megarl.models.description import ModelDescription

# Keys that families read and that are sizes of tensors, do not change what a token's logits are, or have another form in `arithmetic`.
_SIZES = {"vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "kv_lora_rank", "q_lora_rank"}
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts", "moe_num_shared_experts"}
_BESIDE = {
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "layer_types",
    "mlp_only_layers",
    *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    "rope_theta",
    "partial_rotary_factor",
    "rotary_dim",
    "full_attention_interval",
    *("layers_block_type", "hybrid_override_pattern", "time_step_limit", "mamba_ssm_cache_dtype"),
}
_WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers"}  # which do not count where no layer has a window


def arithmetic(model: ModelDescription) -> dict[str, Any]:
    """Return, by config.json's names, what it says of the model's arithmetic.

    Raises ConfigError if the family does not support it.
    """
    sizes = model.sizes
    known = {key: model.config[key] for key in model.family.defaults.keys() - _SIZES - _EXPERTS - _BESIDE - _WINDOWS}
    heads = {"num_key_value_heads": sizes.groups, "head_dim": sizes.head_dim}  # also where config.json leaves them to be derived
    return {"architecture": model.family.heads["lm"].architecture, **known, **heads, **_windows(model), **model.rope.meaning}


def _windows(model: ModelDescription) -> dict[str, Any]:
    """Return the sliding window, and each layer's kind of attention; None: all layers see everything, or all the window."""
    layers = model.fields.get("window_attn_skip_freq")
    types = None if layers is None else [SLIDING if windowed else FULL for windowed in layers]
    return {"sliding_window": model.window, "layer_types": types}


def differences(one: ModelDescription, two: ModelDescription) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which the arithmetic of two models differs, with both values (None: has no such key)."""
    left, right = arithmetic(one), arithmetic(two)
    return {key: (left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)}
