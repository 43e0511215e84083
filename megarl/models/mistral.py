"""Mistral (https://arxiv.org/abs/2310.06825): grouped-query attention, whose heads need not divide the hidden size, and a gated MLP.

In 7B v0.1 all layers have a sliding window. Refused: what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

DEFAULTS: dict[str, Any] = {  # of transformers' MistralConfig
    **decoder.COMMON,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support, such as other activations."""
    decoder.refuse("Mistral", config, windows=True)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return [blocks.embedding(n), *blocks.attention(n), *blocks.dense_mlps(n), blocks.final_norm(n)]


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    windows = decoder.window_fields(config, decoder.uniform_layer_types(config))
    return {**decoder.fields(config, sizes(config), rope(config)), **windows}


FAMILY = Family(
    heads=blocks.heads("Mistral", sizes),
    sizes=sizes,
    weight_map=weight_map,
    fields=fields,
    defaults=DEFAULTS,
    nullable=("sliding_window",),
)
