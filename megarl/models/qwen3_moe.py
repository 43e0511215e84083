"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): grouped-query attention with normalized queries and keys, a mixture of gated experts in
every layer.

Refused: dense layers among them (mlp_only_layers, decoder_sparse_step), biases, and what every family refuses (`parts.refuse`).
"""

from __future__ import annotations

from typing import Any

from megarl.config import ConfigError
from megarl.models import parts
from megarl.models.rope import rope
from megarl.models.rows import Family, Row, Sizes, scalar_head


def sizes(hf: dict[str, Any]) -> Sizes:
    """The model's numbers. Raises ConfigError for what these rows do not hold: dense layers, biases, other activations."""
    parts.refuse("Qwen3-MoE", hf, mlp_only_layers=[], decoder_sparse_step=1, attention_bias=False)
    return parts.decoder_sizes(hf, experts=parts.number(hf, "num_experts"), expert_ffn=parts.number(hf, "moe_intermediate_size"))


def rows(hf: dict[str, Any]) -> list[Row]:
    """Megatron parameter <- Hugging Face tensors, of the backbone."""
    n = sizes(hf)
    return [parts.embedding(n), *parts.attention(n, norm=True), *parts.experts(n), parts.final_norm(n)]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Of Megatron's TransformerConfig."""
    n = sizes(hf)
    if type(hf.get("norm_topk_prob")) is not bool:
        raise ConfigError(f"model.path: config.json's norm_topk_prob={hf.get('norm_topk_prob')!r} is neither true nor false")
    return {**parts.decoder_fields(hf, n, rope(hf), norm=True), **parts.softmax_fields(hf, n, normalized=hf["norm_topk_prob"])}


FAMILY = Family(
    heads={"lm": parts.lm_head("Qwen3MoeForCausalLM", sizes), "value": scalar_head("Qwen3MoeForSequenceClassification", sizes)},
    sizes=sizes,
    rows=rows,
    rope=rope,
    fields=fields,
    optional=parts.tied_twice,
)
