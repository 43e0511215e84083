"""Ministral (8B of 2024, https://mistral.ai/news/ministraux): Mistral's architecture, in which `layer_types` says which layers have a
sliding window; without it all have one.

Refused: what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder, mistral
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family
from megarl.models.rope import rope
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {**mistral.DEFAULTS, "layer_types": None}  # of transformers' MinistralConfig


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support, such as other activations."""
    decoder.refuse("Ministral", config, windows=True)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    windows = decoder.window_fields(config, decoder.layer_types(config))
    return {**decoder.fields(config, sizes(config), rope(config)), **windows}


FAMILY = Family(
    heads=blocks.heads("Ministral", sizes),
    sizes=sizes,
    weight_map=mistral.weight_map,
    fields=fields,
    defaults=DEFAULTS,
    nullable=("sliding_window",),
)
