"""GLM-4.5 (glm4_moe, https://arxiv.org/abs/2508.06471): grouped-query attention that turns half of each head, and DeepSeek-V3's experts
and router.

Chosen over gpt-oss, because Megatron-core 0.16.1 holds all of it as it is: gpt-oss needs attention sinks, a sliding window in every other
layer and biased experts with an activation of their own, and its checkpoints are quantized (MXFP4).
What it predicts beyond the next token (multi-token prediction, one further layer) is not trained here. transformers has no class for its
classifiers: a critic or reward model that is saved can be loaded by megarl alone. Refused: YaRN, whose scale would fall on the part of the
head that is not turned, too, and what every family refuses (`decoder_blocks.refuse`).
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
    """The model's numbers. Raises ConfigError for what this map does not hold."""
    blocks.refuse(NAME, hf)
    return blocks.decoder_sizes(hf, **blocks.sigmoid_sizes(hf))


def weight_map(hf: dict[str, Any]) -> list[WeightMapping]:
    """Megatron parameter <- Hugging Face tensors, of the backbone."""
    n = sizes(hf)
    return [
        blocks.embedding(n),
        *blocks.attention(n, **_attention(hf)),
        *blocks.sigmoid_experts(n),
        blocks.final_norm(n),
    ]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Of Megatron's TransformerConfig."""
    n = sizes(hf)
    return {**blocks.decoder_fields(hf, n, turned(hf), **_attention(hf)), **blocks.sigmoid_fields(NAME, hf, n)}


def _attention(hf: dict[str, Any]) -> dict[str, bool]:
    """The large model has both, GLM-4.5-Air biases alone. The output projection has no bias in either."""
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
