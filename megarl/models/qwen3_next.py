"""Qwen3-Next: three layers of four are gated delta nets (linear attention, https://arxiv.org/abs/2412.06464), the others attention that
rotates a quarter of each head and gates each head's output; a mixture of experts with a gated shared expert in every layer. Norms scale by
1 + weight, except the delta net's own.

Its multi-token prediction is not trained here. Refused: dense layers (mlp_only_layers, decoder_sparse_step), biases, and what every family
refuses (`decoder_blocks.refuse`).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson
from megarl.models.decoder_blocks import BLOCK, LAYER, number
from megarl.models.rope import rope
from megarl.models.weight_map import Family, Plain, Sections, Sizes, WeightMapping, scalar_head

NAME = "Qwen3-Next"
KINDS = ("linear_attention", "full_attention")
turned = partial(rope, partial=True)

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen3NextConfig
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    blocks.refuse(NAME, {**config, "layer_types": None}, mlp_only_layers=[], decoder_sparse_step=1, attention_bias=False)
    keys, values = number(config, "linear_num_key_heads"), number(config, "linear_num_value_heads")
    if values % keys:
        raise ConfigError(f"model.path: config.json's linear_num_key_heads={keys} does not divide linear_num_value_heads={values}")
    return blocks.decoder_sizes(
        config,
        experts=number(config, "num_experts"),
        expert_ffn=number(config, "moe_intermediate_size"),
        shared_ffn=number(config, "shared_expert_intermediate_size"),
        linear_heads=keys,
    )


def linear_layers(config: ConfigJson) -> list[bool]:
    """Return, for each layer, whether it is a gated delta net. Raise ConfigError if config.json does not say it of each."""
    count, types = number(config, "num_hidden_layers"), config["layer_types"]
    if types is None:
        interval = number(config, "full_attention_interval")
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if len(types) != count or not set(types) <= set(KINDS):
        raise ConfigError(f"model.path: config.json's layer_types are not {' or '.join(map(repr, KINDS))}, one for each of {count} layers")
    return [kind == KINDS[0] for kind in types]


def layers_of(config: ConfigJson, *, linear: bool) -> tuple[int, ...]:
    """Return the layers that are gated delta nets, or those that are not."""
    return tuple(layer for layer, own in enumerate(linear_layers(config)) if own == linear)


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return [
        blocks.embedding(n),
        *blocks.attention(n, norm=True, gated=True, layers=layers_of(config, linear=False)),
        *_delta_net(config, n, layers_of(config, linear=True)),
        *blocks.experts(n),
        *blocks.gated_mlp(n, n.shared_ffn, "mlp.shared_experts.", "mlp.shared_expert."),
        blocks.shared_expert_gate(n),
        blocks.final_norm(n),
    ]


def _delta_net(config: ConfigJson, n: Sizes, layers: Collection[int]) -> list[WeightMapping]:
    """Return the mappings of the gated delta nets in these layers, which tensor parallelism splits by key head.

    Beside each key head go the value heads that share it: their values and gates z, decays alpha and learning rates beta.
    """
    ours, theirs, groups = LAYER + "self_attention.", BLOCK + "linear_attn.", n.linear_heads
    shared = number(config, "linear_num_value_heads") // groups
    key, value = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
    turned = (("query", key), ("key", key), ("value", shared * value))
    kinds = (*turned, ("z", shared * value), ("beta", shared), ("alpha", shared))
    heads = Plain((groups * shared,), 0)
    kernel = Sections(groups, turned, (3,), (1, number(config, "linear_conv_kernel_dim")))
    projections = Sections(groups, kinds, (4, 2), (n.hidden,), interleaved=True)
    rows: list[tuple[str, tuple[str, ...], Any]] = [
        ("in_proj.weight", ("in_proj_qkvz.weight", "in_proj_ba.weight"), projections),
        ("conv1d.weight", ("conv1d.weight",), kernel),
        ("dt_bias", ("dt_bias",), heads),
        ("A_log", ("A_log",), heads),
        ("out_norm.weight", ("norm.weight",), Plain((value,))),
        ("out_proj.weight", ("out_proj.weight",), Plain((n.hidden, groups * shared * value), 1)),
    ]
    return [WeightMapping(ours + one, tuple(theirs + name for name in names), op, layers=layers) for one, names, op in rows]


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    n = sizes(config)
    return {
        **blocks.decoder_fields(config, n, turned(config), norm=True),
        **blocks.softmax_fields(config, n, normalized=config["norm_topk_prob"]),
        "moe_shared_expert_intermediate_size": n.shared_ffn,
        "moe_shared_expert_gate": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(linear) for linear in linear_layers(config)],
        **{key: number(config, key) for key in DEFAULTS if key.startswith("linear_")},
    }


def predictors(config: ConfigJson) -> tuple[str, ...]:
    """Return the name prefix of the multi-token prediction layers."""
    return ("mtp.",)


FAMILY = Family(
    heads={"lm": blocks.lm_head("Qwen3NextForCausalLM", sizes), "value": scalar_head("Qwen3NextForSequenceClassification", sizes)},
    sizes=sizes,
    weight_map=weight_map,
    rope=turned,
    fields=fields,
    defaults=DEFAULTS,
    optional=blocks.unused,
    predictors=predictors,
    spellings={"num_local_experts": "num_experts"},
)
