"""Qwen3, dense (https://arxiv.org/abs/2505.09388): grouped-query attention with normalised queries and keys, and a gated MLP.

Refused: biases, sliding windows, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen3Config
    **decoder.COMMON,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "layer_types": None,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: biases, sliding windows, other activations."""
    decoder.refuse("Qwen3", config, attention_bias=False)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return [
        blocks.embedding(n),
        *blocks.attention(n, norm=True),
        *blocks.dense_mlps(n),
        blocks.final_norm(n),
    ]


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    return decoder.fields(config, sizes(config), rope(config), norm=True)


FAMILY = Family(
    heads=blocks.heads("Qwen3", sizes),
    sizes=sizes,
    weight_map=weight_map,
    fields=fields,
    defaults=DEFAULTS,
    nullable=("num_key_value_heads",),
)
