"""Qwen3-MoE: grouped-query attention with normalized queries and keys, a mixture of gated experts in every layer."""

from __future__ import annotations

from typing import Any

from megarl.config import ConfigError
from megarl.models.rows import OUTPUT, QKV, Family, GateUp, Head, Plain, Row, Sizes, scalar_head


def sizes(hf: dict[str, Any]) -> Sizes:
    """The model's numbers. Raises ConfigError for what these rows do not hold: dense layers, biases, other activations."""
    refused = {
        "mlp_only_layers": hf.get("mlp_only_layers") or [],
        "decoder_sparse_step": 0 if hf.get("decoder_sparse_step", 1) == 1 else hf["decoder_sparse_step"],
        "attention_bias": hf.get("attention_bias"),
        "use_sliding_window": hf.get("use_sliding_window"),
        "hidden_act": "" if hf.get("hidden_act", "silu") == "silu" else hf["hidden_act"],
        "quantization_config": hf.get("quantization_config"),
    }
    for key, value in refused.items():
        if value:
            raise ConfigError(f"model.path: config.json's {key}={value!r} is not supported for Qwen3-MoE")
    hidden, heads, groups = _number(hf, "hidden_size"), _number(hf, "num_attention_heads"), _number(hf, "num_key_value_heads")
    if heads % groups:
        raise ConfigError(f"model.path: config.json's num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    return Sizes(
        layers=_number(hf, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=_number(hf, "head_dim") if hf.get("head_dim") is not None else hidden // heads,
        vocab=_number(hf, "vocab_size"),
        ffn=None,
        experts=_number(hf, "num_experts"),
        expert_ffn=_number(hf, "moe_intermediate_size"),
    )


def rows(hf: dict[str, Any]) -> list[Row]:
    """Megatron parameter <- Hugging Face tensors, of the backbone."""
    n = sizes(hf)
    layer, block = "decoder.layers.{layer}.", "model.layers.{layer}."
    expert, mlp = layer + "mlp.experts.local_experts.{expert}.", block + "mlp.experts.{expert}."
    attention = tuple(f"{block}self_attn.{name}_proj.weight" for name in "qkv")
    return [
        Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), _vocabulary(n)),
        Row(layer + "input_layernorm.weight", (block + "input_layernorm.weight",), Plain((n.hidden,))),
        Row(layer + "self_attention.linear_qkv.weight", attention, QKV(n.heads, n.groups, n.head_dim, (n.hidden,))),
        Row(layer + "self_attention.q_layernorm.weight", (block + "self_attn.q_norm.weight",), Plain((n.head_dim,))),
        Row(layer + "self_attention.k_layernorm.weight", (block + "self_attn.k_norm.weight",), Plain((n.head_dim,))),
        Row(layer + "self_attention.linear_proj.weight", (block + "self_attn.o_proj.weight",), Plain((n.hidden, n.heads * n.head_dim), 1)),
        Row(layer + "pre_mlp_layernorm.weight", (block + "post_attention_layernorm.weight",), Plain((n.hidden,))),
        Row(layer + "mlp.router.weight", (block + "mlp.gate.weight",), Plain((n.experts, n.hidden))),
        Row(expert + "linear_fc1.weight", (mlp + "gate_proj.weight", mlp + "up_proj.weight"), GateUp(n.expert_ffn, n.hidden)),
        Row(expert + "linear_fc2.weight", (mlp + "down_proj.weight",), Plain((n.hidden, n.expert_ffn), 1)),
        Row("decoder.final_layernorm.weight", ("model.norm.weight",), Plain((n.hidden,))),
    ]


def _logits(hf: dict[str, Any]) -> Row:
    tied = bool(hf.get("tie_word_embeddings"))
    return Row(OUTPUT, ("model.embed_tokens.weight" if tied else "lm_head.weight",), _vocabulary(sizes(hf)), alias=tied)


def _vocabulary(n: Sizes) -> Plain:
    return Plain((n.vocab, n.hidden), 0, pads=True)


def _optional(hf: dict[str, Any]) -> tuple[str, ...]:
    return ("lm_head.weight",) if hf.get("tie_word_embeddings") else ()


def _number(hf: dict[str, Any], key: str) -> int:
    if key not in hf:
        raise ConfigError(f"model.path: config.json lacks {key}")
    if type(hf[key]) is not int or hf[key] < 1:
        raise ConfigError(f"model.path: config.json's {key}={hf[key]!r} is no positive integer")
    return hf[key]


FAMILY = Family(
    heads={"lm": Head("Qwen3MoeForCausalLM", _logits, {}), "value": scalar_head("Qwen3MoeForSequenceClassification", sizes)},
    sizes=sizes,
    rows=rows,
    optional=_optional,
)
