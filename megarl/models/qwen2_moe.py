"""Qwen1.5-MoE and Qwen2-MoE (https://arxiv.org/abs/2407.10671): grouped-query attention with biases, and a mixture of gated experts beside
a shared expert, which a gate of its own scales. Layers may be dense (mlp_only_layers, decoder_sparse_step), if they are the first ones.

Refused: other dense layers, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

NAME = "Qwen2-MoE"

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen2MoeConfig
    **decoder.COMMON,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    decoder.refuse(NAME, config, qkv_bias=True, dual_chunk_attention_config=None)  # vLLM has the biases, whatever config.json says
    layers, step, only = number(config, "num_hidden_layers"), number(config, "decoder_sparse_step"), config["mlp_only_layers"]
    dense = [layer for layer in range(layers) if layer in (only or ()) or (layer + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        raise ConfigError(
            f"model.path: config.json's decoder_sparse_step={step} and mlp_only_layers={only!r:.200} make other layers dense than the "
            f"first ones, which is not supported for {NAME}"
        )
    n = decoder.sizes(
        config,
        ffn=number(config, "intermediate_size") if dense else None,
        dense=len(dense),
        experts=number(config, "num_experts"),
        expert_ffn=number(config, "moe_intermediate_size"),
        shared_ffn=number(config, "shared_expert_intermediate_size"),
    )
    decoder.check_head_dim(n)  # vLLM derives it
    return n


def mlps(n: Sizes) -> list[WeightMapping]:
    """Return the mappings of the dense MLPs, the experts and the shared expert."""
    rest = range(n.dense, n.layers)
    return [*blocks.dense_mlps(n), *blocks.experts(n, layers=rest), *blocks.gated_shared_expert(n, rest)]


def fields(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig for the experts."""
    return {
        **decoder.softmax_fields(config, n, normalized=config["norm_topk_prob"]),
        "moe_layer_freq": [0] * n.dense + [1] * (n.layers - n.dense) if n.dense else 1,
        **decoder.gated_shared_expert_fields(n),
    }


FAMILY = decoder_family("Qwen2Moe", sizes, DEFAULTS, mlps=mlps, fields=fields, bias=True, spellings={"num_local_experts": "num_experts"})
