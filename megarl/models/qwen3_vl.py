"""Qwen3-VL, dense (https://arxiv.org/abs/2511.21631): Qwen3 with multimodal RoPE, after a vision tower (`vision`).

Refused: what `qwen3` refuses, towers and positions of other kinds (`vision.vision_sizes`), and a `tie_word_embeddings` of text_config that
is not that of the whole model, which transformers reads.
"""

from typing import Any

from megarl.models import qwen3, vision
from megarl.models.config_json import ConfigJson
from megarl.models.family import scalar_head
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen3VLConfig and Qwen3VLTextConfig
    **qwen3.DEFAULTS,
    "hidden_size": 4096,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
    "image_token_id": 151655,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    return vision.with_vision(qwen3.sizes(config), config)


FAMILY = vision.with_tower(
    qwen3.FAMILY,
    sizes,
    "Qwen3VLForConditionalGeneration",
    scalar_head("Qwen3VLForSequenceClassification", sizes, known=False),
    defaults=DEFAULTS,
)
