"""Mixtral (https://arxiv.org/abs/2401.04088): grouped-query attention, and in every layer a mixture of gated experts whose router scales
the probabilities of the chosen experts to a sum of 1.

Refused: sliding windows, and what every family refuses (`decoder_blocks.refuse`).
"""

from __future__ import annotations

from typing import Any

from megarl.models import decoder_blocks as blocks
from megarl.models.rope import rope
from megarl.models.weight_map import Family, Sizes, WeightMapping, scalar_head


def sizes(hf: dict[str, Any]) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: sliding windows, other activations."""
    blocks.refuse("Mixtral", hf, sliding_window=None)
    return blocks.decoder_sizes(hf, experts=blocks.number(hf, "num_local_experts"), expert_ffn=blocks.number(hf, "intermediate_size"))


def weight_map(hf: dict[str, Any]) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(hf)
    return [
        blocks.embedding(n),
        *blocks.attention(n),
        *blocks.experts(n, "block_sparse_moe.", ("w1", "w3", "w2")),
        blocks.final_norm(n),
    ]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    n = sizes(hf)
    return {**blocks.decoder_fields(hf, n, rope(hf)), **blocks.softmax_fields(hf, n, normalized=True)}


FAMILY = Family(
    heads={"lm": blocks.lm_head("MixtralForCausalLM", sizes), "value": scalar_head("MixtralForSequenceClassification", sizes)},
    sizes=sizes,
    weight_map=weight_map,
    rope=rope,
    fields=fields,
    optional=blocks.tied_twice,
)
