"""Qwen3.5-MoE and Qwen3.6-MoE: `qwen3_5_text` with a mixture of experts and a gated shared expert in every layer. Published models stack
each layer's experts in two tensors.
"""

from typing import Any

from megarl.models import decoder, delta_nets
from megarl.models import decoder_blocks as blocks
from megarl.models import qwen3_5_text as qwen3_5
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family, Images
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen3_5MoeTextConfig
    **qwen3_5.DECODER,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    return qwen3_5.decoder_sizes(
        config,
        experts=number(config, "num_experts"),
        expert_ffn=number(config, "moe_intermediate_size"),
        shared_ffn=number(config, "shared_expert_intermediate_size"),
    )


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return delta_nets.backbone(config, n, [*blocks.experts(n), *blocks.gated_shared_expert(n)], by_head=False)


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    n = sizes(config)
    return {
        **qwen3_5.decoder_fields(config, n),
        **decoder.softmax_fields(config, n, normalized=True),
        **decoder.gated_shared_expert_fields(n),
    }


FAMILY = Family(
    heads=blocks.heads("Qwen3_5Moe", sizes, known=False),
    sizes=sizes,
    weight_map=weight_map,
    rope=qwen3_5.turned,
    fields=fields,
    defaults=DEFAULTS,
    predictors=delta_nets.predictors,
    predictor=delta_nets.predictor,
    images=Images("Qwen3_5MoeForConditionalGeneration", "model.language_model.", "model.visual."),
    stacks={"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)},
)
