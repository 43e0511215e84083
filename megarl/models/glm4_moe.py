"""GLM-4.5 (glm4_moe, https://arxiv.org/abs/2508.06471): grouped-query attention that turns half of each head, and DeepSeek-V3's experts
and router.

Chosen over gpt-oss, because Megatron-core 0.16.1 holds all of it as it is: gpt-oss needs attention sinks, a sliding window in every other
layer and biased experts with an activation of their own, and its checkpoints are quantized (MXFP4).
What it predicts beyond the next token (multi-token prediction, one further layer) is not trained here. transformers has no class for its
classifiers: a critic or reward model that is saved can be loaded by megarl alone. Refused: YaRN, whose scale would fall on the part of the
head that is not turned, too, and what every family refuses (`parts.refuse`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megarl.models import parts
from megarl.models.rope import rope
from megarl.models.rows import Family, Row, Sizes, scalar_head

NAME = "GLM-4.5-MoE"
turned = partial(rope, fraction=0.5)


def sizes(hf: dict[str, Any]) -> Sizes:
    """The model's numbers. Raises ConfigError for what these rows do not hold."""
    parts.refuse(NAME, hf)
    return parts.decoder_sizes(hf, **parts.sigmoid_sizes(hf))


def rows(hf: dict[str, Any]) -> list[Row]:
    """Megatron parameter <- Hugging Face tensors, of the backbone."""
    n = sizes(hf)
    return [parts.embedding(n), *parts.attention(n, **_attention(hf)), *parts.sigmoid_experts(n), parts.final_norm(n)]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Of Megatron's TransformerConfig."""
    n = sizes(hf)
    return {**parts.decoder_fields(hf, n, turned(hf), **_attention(hf)), **parts.sigmoid_fields(NAME, hf, n)}


def _attention(hf: dict[str, Any]) -> dict[str, bool]:
    """The large model has both, GLM-4.5-Air biases alone. The output projection has no bias in either."""
    return {"bias": bool(hf.get("attention_bias")), "norm": bool(hf.get("use_qk_norm"))}


FAMILY = Family(
    heads={
        "lm": parts.lm_head("Glm4MoeForCausalLM", sizes),
        "value": scalar_head("Glm4MoeForSequenceClassification", sizes, known=False),
    },
    sizes=sizes,
    rows=rows,
    rope=turned,
    fields=fields,
    optional=parts.tied_twice,
    predictors=parts.predictors,
)
