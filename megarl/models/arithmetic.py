"""What config.json says of a model's arithmetic beside the shapes of its tensors: two models of the same shapes may compute differently."""

from __future__ import annotations

from typing import Any

from megarl.models.description import ModelDescription

# Keys that families read and that are sizes of tensors, do not change what a token's logits are, or have another form in `arithmetic`.
_SIZES = {"vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "kv_lora_rank", "q_lora_rank"}
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"}
_BESIDE = {"max_position_embeddings", "num_nextn_predict_layers", "layer_types", "mlp_only_layers", "rope_theta", "partial_rotary_factor"}


def arithmetic(model: ModelDescription) -> dict[str, Any]:
    """Return, by config.json's names, what it says of the model's arithmetic.

    Raises ConfigError if the family does not support it.
    """
    sizes = model.sizes
    known = {key: model.config[key] for key in model.family.defaults.keys() - _SIZES - _EXPERTS - _BESIDE}
    heads = {"num_key_value_heads": sizes.groups, "head_dim": sizes.head_dim}  # also where config.json leaves them to be derived
    return {"architecture": model.family.heads["lm"].architecture, **known, **heads, **model.rope.meaning}


def differences(one: ModelDescription, two: ModelDescription) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which the arithmetic of two models differs, with both values (None: has no such key)."""
    left, right = arithmetic(one), arithmetic(two)
    return {key: (left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)}
