"""Qwen3-Next: three layers of four are gated delta nets (linear attention, https://arxiv.org/abs/2412.06464), the others attention that
rotates a quarter of each head and gates each head's output; a mixture of experts with a gated shared expert in every layer. Norms scale by
1 + weight, except the delta net's own.

Refused: dense layers (mlp_only_layers, decoder_sparse_step), biases, and what every family
refuses (`decoder.refuse`).
"""

from functools import partial
from typing import Any

from megarl.models import decoder, delta_nets
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

NAME = "Qwen3-Next"
turned = partial(rope, partial=True)

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen3NextConfig
    **decoder.COMMON,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    **delta_nets.DEFAULTS,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    decoder.refuse(NAME, {**config, "layer_types": None}, mlp_only_layers=[], decoder_sparse_step=1, attention_bias=False)
    return decoder.sizes(
        config,
        experts=number(config, "num_experts"),
        expert_ffn=number(config, "moe_intermediate_size"),
        shared_ffn=number(config, "shared_expert_intermediate_size"),
        linear_heads=delta_nets.key_heads(config),
    )


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return delta_nets.backbone(config, n, [*blocks.experts(n), *blocks.gated_shared_expert(n)], by_head=True)


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    n = sizes(config)
    return {
        **decoder.fields(config, n, turned(config), norm=True),
        **decoder.softmax_fields(config, n, normalized=config["norm_topk_prob"]),
        **decoder.gated_shared_expert_fields(n),
        **delta_nets.fields(config),
    }


FAMILY = Family(
    heads=blocks.heads("Qwen3Next", sizes),
    sizes=sizes,
    weight_map=weight_map,
    rope=turned,
    fields=fields,
    defaults=DEFAULTS,
    predictors=delta_nets.predictors,
    predictor=delta_nets.predictor,
    spellings={"num_local_experts": "num_experts"},
)
