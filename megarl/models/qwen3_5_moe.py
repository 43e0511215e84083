"""Qwen3.5-MoE and Qwen3.6-MoE as published: `qwen3_5_moe_text` after a vision tower, as `qwen3_5` is.

Published models stack each layer's experts in two tensors, gate before up on the rows of the first; so does what is written. A tensor for
each matrix, as transformers 5 saves a model of its own making, is read, too.
"""

from typing import Any

from megarl.models import qwen3_5, qwen3_5_moe_text, vision
from megarl.models.config_json import ConfigJson
from megarl.models.family import scalar_head
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {**qwen3_5_moe_text.DEFAULTS, **qwen3_5.SEEN}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    return qwen3_5.with_vision(qwen3_5_moe_text.sizes(config), config)


FAMILY = vision.with_tower(
    qwen3_5_moe_text.FAMILY,
    sizes,
    "Qwen3_5MoeForConditionalGeneration",
    scalar_head("Qwen3_5MoeVLForSequenceClassification", sizes, known=False),
    defaults=DEFAULTS,
    stacked=True,
)
