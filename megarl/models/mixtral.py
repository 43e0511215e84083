"""Mixtral (https://arxiv.org/abs/2401.04088): grouped-query attention, a mixture of gated experts in every layer, whose chosen
probabilities are scaled to a sum of 1.

Refused: sliding windows, and what every family refuses (`parts.refuse`).
"""

from __future__ import annotations

from typing import Any

from megarl.models import parts
from megarl.models.rope import rope
from megarl.models.rows import Family, Row, Sizes, scalar_head


def sizes(hf: dict[str, Any]) -> Sizes:
    """The model's numbers. Raises ConfigError for what these rows do not hold: sliding windows, other activations."""
    parts.refuse("Mixtral", hf, sliding_window=None)
    return parts.decoder_sizes(hf, experts=parts.number(hf, "num_local_experts"), expert_ffn=parts.number(hf, "intermediate_size"))


def rows(hf: dict[str, Any]) -> list[Row]:
    """Megatron parameter <- Hugging Face tensors, of the backbone."""
    n = sizes(hf)
    return [
        parts.embedding(n),
        *parts.attention(n),
        *parts.experts(n, "block_sparse_moe.", ("w1", "w3", "w2")),
        parts.final_norm(n),
    ]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Of Megatron's TransformerConfig."""
    n = sizes(hf)
    return {**parts.decoder_fields(hf, n, rope(hf)), **parts.softmax_fields(hf, n, normalized=True)}


FAMILY = Family(
    heads={"lm": parts.lm_head("MixtralForCausalLM", sizes), "value": scalar_head("MixtralForSequenceClassification", sizes)},
    sizes=sizes,
    rows=rows,
    rope=rope,
    fields=fields,
    optional=parts.tied_twice,
)
