"""Ministral (8B of 2024, https://mistral.ai/news/ministraux): Mistral's architecture, in which `layer_types` says which layers have a
sliding window; without it all have one.

Refused: what every family refuses (`decoder_blocks.refuse`).
"""

from typing import Any

from megarl.models import decoder_blocks as blocks
from megarl.models import mistral
from megarl.models.config_json import ConfigJson
from megarl.models.family import Family, scalar_head
from megarl.models.rope import rope
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {**mistral.DEFAULTS, "layer_types": None}  # of transformers' MinistralConfig


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support, such as other activations."""
    blocks.refuse("Ministral", config, windows=True)
    return blocks.decoder_sizes(config, ffn=blocks.number(config, "intermediate_size"))


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    windows = blocks.window_fields(config, blocks.layer_types(config))
    return {**blocks.decoder_fields(config, sizes(config), rope(config)), **windows}


FAMILY = Family(
    heads={"lm": blocks.lm_head("MinistralForCausalLM", sizes), "value": scalar_head("MinistralForSequenceClassification", sizes)},
    sizes=sizes,
    weight_map=mistral.weight_map,
    rope=rope,
    fields=fields,
    defaults=DEFAULTS,
    nullable=("sliding_window",),
    optional=blocks.unused,
)
