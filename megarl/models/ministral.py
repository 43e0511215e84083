"""Ministral (8B of 2024, https://mistral.ai/news/ministraux): Mistral's architecture, in which `layer_types` says which layers have a
sliding window; without it all have one.

Refused: what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder, mistral
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {**mistral.DEFAULTS, "layer_types": None}  # of transformers' MinistralConfig


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support, such as other activations."""
    decoder.refuse("Ministral", config, windows=True)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


def windows(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the TransformerConfig fields of the sliding windows. Raise ConfigError for `layer_types` that do not fit."""
    return decoder.window_fields(config, decoder.layer_types(config))


FAMILY = decoder_family("Ministral", sizes, DEFAULTS, fields=windows, nullable=("sliding_window",))
