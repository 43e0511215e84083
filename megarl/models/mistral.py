"""Mistral (https://arxiv.org/abs/2310.06825): grouped-query attention, whose heads need not divide the hidden size, and a gated MLP.

In 7B v0.1 all layers have a sliding window. Refused: what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes

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


def windows(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the TransformerConfig fields of the sliding windows, which all layers have or none."""
    return decoder.window_fields(config, decoder.uniform_layer_types(config))


FAMILY = decoder_family("Mistral", sizes, DEFAULTS, fields=windows, nullable=("sliding_window",))
