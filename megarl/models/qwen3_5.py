"""Qwen3.5 and 3.6, dense, as published: `qwen3_5_text` with multimodal RoPE, after Qwen3-VL's vision tower without deepstack (`vision`).

With `model.drop_images` such a model is read as `qwen3_5_text`. Refused: what that refuses, towers and positions of other kinds, a layer of
multi-token prediction that is to be trained, and a `tie_word_embeddings` of text_config that is not that of the whole model.
"""

from typing import Any

from megarl.models import qwen3_5_text, vision
from megarl.models.config_json import ConfigJson
from megarl.models.family import scalar_head
from megarl.models.sizes import Sizes

SECTIONS = (11, 11, 10)  # of transformers' rotary embedding, where config.json does not say
SEEN: dict[str, Any] = {"image_token_id": 248056}  # of transformers' Qwen3_5Config and Qwen3_5MoeConfig
DEFAULTS: dict[str, Any] = {**qwen3_5_text.DEFAULTS, **SEEN}


def with_vision(n: Sizes, config: ConfigJson) -> Sizes:
    """Return the sizes of a language model with those of its tower."""
    pairs = int(n.head_dim * qwen3_5_text.turned(config).fraction) // 2
    return vision.with_vision(n, config, pairs=pairs, sections=SECTIONS, deepstack=None)


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    return with_vision(qwen3_5_text.sizes(config), config)


FAMILY = vision.with_tower(
    qwen3_5_text.FAMILY,
    sizes,
    "Qwen3_5ForConditionalGeneration",
    scalar_head("Qwen3_5ForSequenceClassification", sizes),
    defaults=DEFAULTS,
)
