"""Qwen3.5-MoE and Qwen3.6-MoE as published: `qwen3_5_moe_text` after a vision tower, as `qwen3_5` is.

Published models stack each layer's experts in two tensors, gate before up on the rows of the first; so does what is written. A tensor for
each matrix, as transformers 5 saves a model of its own making, is read, too.
"""

from typing import Any

from megarl.models import delta_nets, qwen3_5, qwen3_5_moe_text, vision
from megarl.models.config_json import ConfigJson
from megarl.models.family import Family, scalar_head
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

DEFAULTS: dict[str, Any] = {**qwen3_5_moe_text.DEFAULTS, **qwen3_5.SEEN}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    return qwen3_5.with_vision(qwen3_5_moe_text.sizes(config), config)


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of tower and backbone: Megatron parameter <- Hugging Face tensors."""
    return vision.whole(sizes(config), qwen3_5_moe_text.weight_map(config))


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig. Raise ConfigError as `sizes` does."""
    sizes(config)
    return {**qwen3_5_moe_text.fields(config), **vision.FIELDS}


FAMILY = Family(
    heads={
        "lm": vision.lm_head("Qwen3_5MoeForConditionalGeneration", sizes),
        "value": scalar_head("Qwen3_5MoeVLForSequenceClassification", sizes, known=False),
    },
    sizes=sizes,
    weight_map=weight_map,
    rope=qwen3_5_moe_text.FAMILY.rope,
    fields=fields,
    defaults=DEFAULTS,
    predictors=delta_nets.predictors,
    stacked=True,
    nested=True,
    stacks=qwen3_5_moe_text.FAMILY.stacks,
)
