"""Qwen2 and Qwen2.5, dense (https://arxiv.org/abs/2407.10671, https://arxiv.org/abs/2412.15115): grouped-query attention with biased
queries, keys and values, a gated MLP; small ones tie the embeddings.

Refused: sliding windows in use, and what every family refuses (`parts.refuse`). YaRN, which 2.5 documents for long texts, is served.
"""

from __future__ import annotations

from typing import Any

from megarl.models import parts
from megarl.models.rope import rope
from megarl.models.rows import Family, Row, Sizes, scalar_head


def sizes(hf: dict[str, Any]) -> Sizes:
    """The model's numbers. Raises ConfigError for what these rows do not hold: sliding windows, other activations."""
    parts.refuse("Qwen2", hf)
    return parts.decoder_sizes(hf, ffn=parts.number(hf, "intermediate_size"))


def rows(hf: dict[str, Any]) -> list[Row]:
    """Megatron parameter <- Hugging Face tensors, of the backbone."""
    n = sizes(hf)
    assert n.ffn is not None
    return [parts.embedding(n), *parts.attention(n, bias=True), *parts.gated_mlp(n, n.ffn), parts.final_norm(n)]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Of Megatron's TransformerConfig."""
    return parts.decoder_fields(hf, sizes(hf), rope(hf), bias=True)


FAMILY = Family(
    heads={"lm": parts.lm_head("Qwen2ForCausalLM", sizes), "value": scalar_head("Qwen2ForSequenceClassification", sizes)},
    sizes=sizes,
    rows=rows,
    rope=rope,
    fields=fields,
    optional=parts.tied_twice,
)
