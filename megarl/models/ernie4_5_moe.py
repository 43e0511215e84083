"""Ernie-4.5-MoE (https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): grouped-query attention whose rotary embedding turns
neighbouring values, and beside shared experts, where there are any, a mixture of experts, chosen by softmax plus a bias and weighted by the
softmax over the chosen ones. The first layers are dense.

Refused: other dense layers, biases, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes
from megarl.models.weight_map import BLOCK, LAYER, WeightMapping
from megarl.models.weight_ops import OneRow

NAME = "Ernie-4.5-MoE"

DEFAULTS: dict[str, Any] = {  # of transformers' Ernie4_5_MoeConfig
    **decoder.COMMON,
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
    "num_nextn_predict_layers": 0,
}
_INDICES = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_num_shared_experts")


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    decoder.refuse(NAME, config, use_bias=False, moe_norm_min=1e-12, sliding_window=None)
    layers, inner = number(config, "num_hidden_layers"), number(config, "moe_intermediate_size")
    for key in _INDICES:
        if type(config[key]) is not int:
            raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200} is not an integer")
    start, end, interval, shared = (config[key] for key in _INDICES)
    routed = range(max(start, 0), layers)
    if interval != 1 or not routed or (end != -1 and end < layers - 1) or shared < 0:
        raise ConfigError(
            f"model.path: config.json's moe_layer_start_index={start}, moe_layer_end_index={end} and moe_layer_interval={interval} for "
            f"{layers} layers, with moe_num_shared_experts={shared}: for {NAME} all layers from the first with experts on must have them"
        )
    return decoder.sizes(
        config,
        ffn=number(config, "intermediate_size") if routed.start else None,
        dense=routed.start,
        experts=number(config, "moe_num_experts"),
        expert_ffn=inner,
        shared_ffn=shared * inner,
    )


def mlps(n: Sizes) -> list[WeightMapping]:
    """Return the mappings of the dense MLPs, the router, the experts and the shared ones."""
    rest, bias = range(n.dense, n.layers), BLOCK + "mlp.moe_statics.e_score_correction_bias"
    return [
        *blocks.dense_mlps(n),
        *blocks.experts(n, layers=rest),
        WeightMapping(LAYER + "mlp.router.expert_bias", (bias,), OneRow(n.experts), layers=rest, float32=True),
        *(blocks.gated_mlp(n, n.shared_ffn, "mlp.shared_experts.", "mlp.shared_experts.", rest) if n.shared_ffn else []),
    ]


def predictors(config: ConfigJson) -> tuple[str, ...]:
    """Return the name prefix of the multi-token prediction layer."""
    return ("model.mtp_",) if config["num_nextn_predict_layers"] else ()


def fields(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig beside those of a dense decoder."""
    return {
        **decoder.softmax_fields({**config, "num_experts_per_tok": config["moe_k"]}, n, normalized=True),
        "moe_router_enable_expert_bias": True,
        "moe_layer_freq": [0] * n.dense + [1] * (n.layers - n.dense) if n.dense else 1,
        "moe_shared_expert_intermediate_size": n.shared_ffn or None,
        "rotary_interleaved": True,
    }


FAMILY = decoder_family(
    "Ernie4_5_Moe",
    sizes,
    DEFAULTS,
    mlps=mlps,
    fields=fields,
    known=False,
    predictors=predictors,
    spellings={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)
