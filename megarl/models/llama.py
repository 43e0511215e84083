"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783): grouped-query attention and a gated MLP; since 3.1, RoPE with frequencies scaled by
wavelength; the 3.2 models tie the embeddings.

Refused: biases of attention or MLP, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

DEFAULTS: dict[str, Any] = {  # of transformers' LlamaConfig
    **decoder.COMMON,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: biases, other activations."""
    decoder.refuse("Llama", config, attention_bias=False, mlp_bias=False)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return [blocks.embedding(n), *blocks.attention(n), *blocks.dense_mlps(n), blocks.final_norm(n)]


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    return decoder.fields(config, sizes(config), rope(config))


FAMILY = Family(
    heads=blocks.heads("Llama", sizes),
    sizes=sizes,
    weight_map=weight_map,
    fields=fields,
    defaults=DEFAULTS,
)
