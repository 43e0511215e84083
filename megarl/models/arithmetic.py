"""What config.json says of a model's arithmetic beside the shapes of its tensors: two models of the same shapes may compute differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.registry import family_of

# Keys that families read and that are sizes of tensors, do not change what a token's logits are, or have another form in `arithmetic`.
_SIZES = {"vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "kv_lora_rank", "q_lora_rank"}
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"}
_BESIDE = {"max_position_embeddings", "num_nextn_predict_layers", "layer_types", "mlp_only_layers", "rope_theta", "partial_rotary_factor"}


def arithmetic(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by config.json's names, what a completed config.json (`registry.completed`) says of the model's arithmetic.

    Raises ConfigError if the family does not support it.
    """
    config = dict(hf)
    family = family_of(config)
    sizes = family.sizes(config)
    known = {key: config[key] for key in family.defaults.keys() - _SIZES - _EXPERTS - _BESIDE}
    heads = {"num_key_value_heads": sizes.groups, "head_dim": sizes.head_dim}  # also where config.json leaves them to be derived
    return {"architecture": family.heads["lm"].architecture, **known, **heads, **family.rope(config).meaning}


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which the arithmetic of two completed config.json differs, with both values (None: has no such key)."""
    left, right = arithmetic(one), arithmetic(two)
    return {key: (left.get(key), right.get(key)) for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)}
