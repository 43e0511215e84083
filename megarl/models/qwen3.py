"""Qwen3, dense (https://arxiv.org/abs/2505.09388): grouped-query attention with normalised queries and keys, and a gated MLP.

Refused: biases, sliding windows, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes

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


FAMILY = decoder_family("Qwen3", sizes, DEFAULTS, norm=True, nullable=("num_key_value_heads",))
