"""gpt-oss (https://arxiv.org/abs/2508.10925): grouped-query attention with sinks, in every other layer with a sliding window, biases
everywhere but in the norms, and a mixture of experts in every layer, whose gated units are clamped:

    gate = min(x W_g + b_g, limit)
    up = clamp(x W_u + b_u, -limit, limit)
    y = gate * sigmoid(1.702 gate) * (up + 1) W_d + b_d

The router's softmax is over the chosen experts. Published weights are MXFP4, and are read as bfloat16 (`quantized.from_mxfp4`).

Refused: other slopes of the sigmoid than 1.702 (Megatron's quick_gelu), attention without biases, and what every family refuses
(`decoder.refuse`).
"""

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.rope import Rope
from megarl.models.rope import rope as described_rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import BLOCK, LAYER, WeightMapping
from megarl.models.weight_ops import Interleaved, Plain, Transposed

NAME = "gpt-oss"

DEFAULTS: dict[str, Any] = {  # of transformers' GptOssConfig
    **decoder.COMMON,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "layer_types": None,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
# transformers' RoPE where config.json describes none.
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map and Megatron do not support."""
    decoder.refuse(NAME, config, windows=True, attention_bias=True, swiglu_alpha=1.702)
    experts, inner = number(config, "num_local_experts"), number(config, "intermediate_size")
    return decoder.sizes(config, experts=experts, expert_ffn=inner)


def sinks_and_mixture(n: Sizes) -> list[WeightMapping]:
    """Return the mappings of the attention's sinks and output bias, the router and the experts."""
    attention, mlp = LAYER + "self_attention.", LAYER + "mlp."
    router, expert = BLOCK + "mlp.router.", BLOCK + "mlp.experts.{expert}."
    return [
        WeightMapping(attention + "linear_proj.bias", (BLOCK + "self_attn.o_proj.bias",), Plain((n.hidden,))),
        WeightMapping(attention + "core_attention.softmax_offset", (BLOCK + "self_attn.sinks",), Plain((n.heads,), 0)),
        WeightMapping(mlp + "router.weight", (router + "weight",), Plain((n.experts, n.hidden))),
        WeightMapping(mlp + "router.bias", (router + "bias",), Plain((n.experts,))),
        WeightMapping(blocks.EXPERT + "linear_fc1.weight", (expert + "gate_up_proj",), Interleaved(n.expert_ffn, (n.hidden,))),
        WeightMapping(blocks.EXPERT + "linear_fc1.bias", (expert + "gate_up_proj_bias",), Interleaved(n.expert_ffn, ())),
        WeightMapping(blocks.EXPERT + "linear_fc2.weight", (expert + "down_proj",), Transposed(n.hidden, n.expert_ffn)),
        WeightMapping(blocks.EXPERT + "linear_fc2.bias", (expert + "down_proj_bias",), Plain((n.hidden,))),
    ]


def rope(config: ConfigJson) -> Rope:
    """Return the rotary embedding. Raise ConfigError as `rope.rope` does."""
    given = config.get("rope_scaling") or config.get("rope_parameters")
    return described_rope(config if given else {**config, "rope_parameters": ROPE})


def fields(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return Megatron's fields beside those of a dense decoder. Raise ConfigError for a limit that is not positive."""
    limit = config["swiglu_limit"]
    if not isinstance(limit, int | float) or isinstance(limit, bool) or limit <= 0:
        raise ConfigError(f"model.path: config.json's swiglu_limit={limit!r:.200} is not a positive number")
    every_other = [decoder.FULL if layer % 2 else decoder.SLIDING for layer in range(n.layers)]
    return {
        **decoder.softmax_fields(config, n, normalized=True),
        **decoder.window_fields(config, decoder.layer_types(config, every_other)),
        "add_bias_linear": True,
        "bias_dropout_fusion": False,  # moe/experts.py:205
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": float(limit),
        "glu_linear_offset": 1.0,
    }


FAMILY = decoder_family(
    "GptOss",
    sizes,
    DEFAULTS,
    mlps=sinks_and_mixture,
    fields=fields,
    rope=rope,
    bias=True,
    nullable=("sliding_window",),
    spellings={"num_experts": "num_local_experts"},
    stacked=True,
)
