"""Qwen2 and Qwen2.5, dense (https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2412.15115): grouped-query attention with biases of
query, key and value, and a gated MLP; small models tie the embeddings. With `use_sliding_window` the layers from `max_window_layers` on
have a sliding window, or those that `layer_types` says.

Refused: what every family refuses (`decoder.refuse`). YaRN, which Qwen2.5 documents for long texts, is
supported.
"""

from typing import Any

from megarl.models import decoder
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen2Config
    **decoder.COMMON,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support, such as other activations."""
    decoder.refuse("Qwen2", config, windows=True)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


def windows(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the TransformerConfig fields of the sliding windows. Raise ConfigError for `layer_types` that do not fit."""
    used = {**config, "sliding_window": config["sliding_window"] if config["use_sliding_window"] else None}
    first = config["max_window_layers"] if used["sliding_window"] is not None else config["num_hidden_layers"]
    default = [decoder.SLIDING if layer >= first else decoder.FULL for layer in range(config["num_hidden_layers"])]
    return decoder.window_fields(used, decoder.layer_types(used, default))


FAMILY = decoder_family("Qwen2", sizes, DEFAULTS, fields=windows, bias=True, nullable=("num_key_value_heads", "sliding_window"))
