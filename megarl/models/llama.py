"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783): grouped-query attention, a gated MLP, from 3.1 on RoPE that is slowed by wavelength;
the 3.2 models tie the embeddings.

Refused: biases of attention or MLP, and what every family refuses (`parts.refuse`).
"""

from __future__ import annotations

from typing import Any

from megarl.models import parts
from megarl.models.rope import rope
from megarl.models.rows import Family, Row, Sizes, scalar_head


def sizes(hf: dict[str, Any]) -> Sizes:
    """The model's numbers. Raises ConfigError for what these rows do not hold: biases, other activations."""
    parts.refuse("Llama", hf, attention_bias=False, mlp_bias=False)
    return parts.decoder_sizes(hf, ffn=parts.number(hf, "intermediate_size"))


def rows(hf: dict[str, Any]) -> list[Row]:
    """Megatron parameter <- Hugging Face tensors, of the backbone."""
    n = sizes(hf)
    assert n.ffn is not None
    return [parts.embedding(n), *parts.attention(n), *parts.gated_mlp(n, n.ffn), parts.final_norm(n)]


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Of Megatron's TransformerConfig."""
    return parts.decoder_fields(hf, sizes(hf), rope(hf))


def _optional(hf: dict[str, Any]) -> tuple[str, ...]:
    """Old checkpoints store RoPE's frequencies, which config.json gives."""
    stored = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(hf["num_hidden_layers"]))
    return (*parts.tied_twice(hf), *stored)


FAMILY = Family(
    heads={"lm": parts.lm_head("LlamaForCausalLM", sizes), "value": scalar_head("LlamaForSequenceClassification", sizes)},
    sizes=sizes,
    rows=rows,
    rope=rope,
    fields=fields,
    optional=_optional,
)
