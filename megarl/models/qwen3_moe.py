"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): grouped-query attention with normalised queries and keys, and a mixture of gated experts in
every layer.

Refused: dense layers (mlp_only_layers, decoder_sparse_step), biases, and what every family refuses (`decoder_blocks.refuse`).
"""

from __future__ import annotations

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder_blocks as blocks
from megarl.models.rope import rope
from megarl.models.weight_map import Family, Sizes, WeightMapping, scalar_head


def sizes(hf: dict[str, Any]) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: dense layers, biases, other activations."""
    blocks.refuse("Qwen3-MoE", hf, mlp_only_layers=[], decoder_sparse_step=1, attention_bias=False)
    return blocks.decoder_sizes(hf, experts=blocks.number(hf, "num_experts"), expert_ffn=blocks.number(hf, "moe_intermediate_size"))


def weight_map(hf: dict[str, Any]) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(hf)
    return [blocks.embedding(n), *blocks.attention(n, norm=True), *blocks.experts(n), blocks.final_norm(n)]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    n = sizes(hf)
    if type(hf.get("norm_topk_prob")) is not bool:
        raise ConfigError(f"model.path: config.json's norm_topk_prob={hf.get('norm_topk_prob')!r} is neither true nor false")
    return {
        **blocks.decoder_fields(hf, n, rope(hf), norm=True),
        **blocks.softmax_fields(hf, n, normalized=hf["norm_topk_prob"]),
    }


FAMILY = Family(
    heads={"lm": blocks.lm_head("Qwen3MoeForCausalLM", sizes), "value": scalar_head("Qwen3MoeForSequenceClassification", sizes)},
    sizes=sizes,
    weight_map=weight_map,
    rope=rope,
    fields=fields,
    optional=blocks.tied_twice,
)
