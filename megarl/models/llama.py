"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783): grouped-query attention and a gated MLP; since 3.1, RoPE with frequencies scaled by
wavelength; the 3.2 models tie the embeddings.

Refused: biases of attention or MLP, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes

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


FAMILY = decoder_family("Llama", sizes, DEFAULTS)
