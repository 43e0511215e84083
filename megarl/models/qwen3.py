"""Qwen3, dense (https://arxiv.org/abs/2505.09388): grouped-query attention with normalized queries and keys, a gated MLP.

Refused: biases, sliding windows, and what every family refuses (`parts.refuse`).
"""

from __future__ import annotations

from typing import Any

from megarl.models import parts
from megarl.models.rope import rope
from megarl.models.rows import Family, Row, Sizes, scalar_head


def sizes(hf: dict[str, Any]) -> Sizes:
    """The model's numbers. Raises ConfigError for what these rows do not hold: biases, sliding windows, other activations."""
    parts.refuse("Qwen3", hf, attention_bias=False)
    return parts.decoder_sizes(hf, ffn=parts.number(hf, "intermediate_size"))


def rows(hf: dict[str, Any]) -> list[Row]:
    """Megatron parameter <- Hugging Face tensors, of the backbone."""
    n = sizes(hf)
    assert n.ffn is not None
    return [parts.embedding(n), *parts.attention(n, norm=True), *parts.gated_mlp(n, n.ffn), parts.final_norm(n)]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Of Megatron's TransformerConfig."""
    return parts.decoder_fields(hf, sizes(hf), rope(hf), norm=True)


FAMILY = Family(
    heads={"lm": parts.lm_head("Qwen3ForCausalLM", sizes), "value": scalar_head("Qwen3ForSequenceClassification", sizes)},
    sizes=sizes,
    rows=rows,
    rope=rope,
    fields=fields,
    optional=parts.tied_twice,
)
