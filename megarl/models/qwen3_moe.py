"""Qwen3-MoE (https://arxiv.org/abs/2505.09388): grouped-query attention with normalised queries and keys, and a mixture of gated experts in
every layer.

Refused: dense layers (mlp_only_layers, decoder_sparse_step), biases, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen3MoeConfig
    **decoder.COMMON,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: dense layers, biases, other activations."""
    decoder.refuse("Qwen3-MoE", config, mlp_only_layers=[], decoder_sparse_step=1, attention_bias=False)
    experts, inner = number(config, "num_experts"), number(config, "moe_intermediate_size")
    return decoder.sizes(config, experts=experts, expert_ffn=inner)


def router(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig for the router."""
    return decoder.softmax_fields(config, n, normalized=config["norm_topk_prob"])


FAMILY = decoder_family(
    "Qwen3Moe", sizes, DEFAULTS, mlps=blocks.experts, fields=router, norm=True, spellings={"num_local_experts": "num_experts"}
)
