"""Granite 3 (https://arxiv.org/abs/2408.13359), the dense models: Llama's, with the factors of `granitemoe` on embeddings, residual stream,
attention scores and logits.

transformers has no class for its classifiers, so only megarl can load a saved critic or reward model. Refused: biases of attention or
MLP, sliding windows, sinks and a RoPE for each layer (Granite-SWA's), and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family
from megarl.models.granitemoe import FACTORS, UNIFORM, multipliers, softmax_scale
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

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


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return [blocks.embedding(n), *blocks.attention(n), *blocks.dense_mlps(n), blocks.final_norm(n)]


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig. Raise ConfigError for a factor that is not positive."""
    turned = rope(config)
    multipliers(config)
    return {**decoder.fields(config, sizes(config), turned), "softmax_scale": softmax_scale(config, turned)}


FAMILY = Family(
    heads=blocks.heads("Granite", sizes, known=False),
    sizes=sizes,
    weight_map=weight_map,
    fields=fields,
    multipliers=multipliers,
    defaults=DEFAULTS,
)
