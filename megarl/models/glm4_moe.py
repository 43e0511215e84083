"""GLM-4.5 (glm4_moe, https://arxiv.org/abs/2508.06471): grouped-query attention that rotates half of each head, and DeepSeek-V3's experts
and router.

It was chosen over gpt-oss because Megatron-core 0.16.1 supports all of it: gpt-oss needs attention sinks, a sliding window in every other
layer and biased experts with their own activation function, and its checkpoints are quantized (MXFP4).
Its multi-token prediction (one further layer) is not trained here. transformers has no class for its classifiers, so only megarl can load a
saved critic or reward model. Refused: YaRN, whose scale would also affect the part of the head that is not rotated, and what every family
refuses (`decoder_blocks.refuse`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megarl.models import decoder_blocks as blocks
from megarl.models.rope import rope
from megarl.models.weight_map import Family, Sizes, WeightMapping, scalar_head

NAME = "GLM-4.5-MoE"
turned = partial(rope, fraction=0.5)


def sizes(hf: dict[str, Any]) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    blocks.refuse(NAME, hf)
    return blocks.decoder_sizes(hf, **blocks.sigmoid_sizes(hf))


def weight_map(hf: dict[str, Any]) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(hf)
    return [
        blocks.embedding(n),
        *blocks.attention(n, **_attention(hf)),
        *blocks.sigmoid_experts(n),
        blocks.final_norm(n),
    ]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    n = sizes(hf)
    return {**blocks.decoder_fields(hf, n, turned(hf), **_attention(hf)), **blocks.sigmoid_fields(NAME, hf, n)}


def _attention(hf: dict[str, Any]) -> dict[str, bool]:
    """Return the arguments of `attention`: the large model has biases and norms, GLM-4.5-Air only biases.

    The output projection has no bias in either.
    """
    return {"bias": bool(hf.get("attention_bias")), "norm": bool(hf.get("use_qk_norm"))}


FAMILY = Family(
    heads={
        "lm": blocks.lm_head("Glm4MoeForCausalLM", sizes),
        "value": scalar_head("Glm4MoeForSequenceClassification", sizes, known=False),
    },
    sizes=sizes,
    weight_map=weight_map,
    rope=turned,
    fields=fields,
    optional=blocks.tied_twice,
    predictors=blocks.predictors,
)
