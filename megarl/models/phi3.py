"""Phi-3's architecture as used by Phi-4 (https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2412.08905): Llama's, with query, key and
value in one tensor, and gate and up projection in another.

In Phi-3-mini-4k all layers have a sliding window. Refused: every scaled RoPE (longrope: Phi-4-mini and the 128k models; transformers treats
"yarn" as longrope), biases, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family
from megarl.models.rope import Rope, rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

NAME = "Phi-3"

DEFAULTS: dict[str, Any] = {  # of transformers' Phi3Config
    **decoder.COMMON,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: biases, other activations."""
    decoder.refuse(NAME, config, windows=True, attention_bias=False, mlp_bias=False, resid_pdrop=0.0, embd_pdrop=0.0)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return [
        blocks.embedding(n),
        *blocks.attention(n, fused=True),
        *blocks.dense_mlps(n, fused=True),
        blocks.final_norm(n),
    ]


def plain_rope(config: ConfigJson) -> Rope:
    """Return the unscaled RoPE, which config.json may limit to a part of each head. Raise ConfigError for a scaled one."""
    plain = rope(config, partial=True)
    if plain.kind != "default":
        raise ConfigError(f"model.path: RoPE of type {plain.kind!r} is not supported for {NAME}: 'default' is")
    return plain


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    windows = decoder.window_fields(config, decoder.uniform_layer_types(config))
    return {**decoder.fields(config, sizes(config), plain_rope(config)), **windows}


FAMILY = Family(
    heads=blocks.heads("Phi3", sizes),
    sizes=sizes,
    weight_map=weight_map,
    rope=plain_rope,
    fields=fields,
    defaults=DEFAULTS,
)
