"""Granite 3 (https://arxiv.org/abs/2408.13359), the dense models: Llama's, with the factors of `granitemoe` on embeddings, residual stream,
attention scores and logits.

transformers has no class for its classifiers, so only megarl can load a saved critic or reward model. Refused: biases of attention or
MLP, sliding windows, sinks and a RoPE for each layer (Granite-SWA's), and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.granitemoe import FACTORS, UNIFORM, factors, multipliers
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {  # of transformers' GraniteConfig
    **decoder.COMMON,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    **FACTORS,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: biases, layers that differ."""
    decoder.refuse("Granite", config, **UNIFORM, attention_bias=False, mlp_bias=False)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


FAMILY = decoder_family("Granite", sizes, DEFAULTS, fields=factors, known=False, multipliers=multipliers)
