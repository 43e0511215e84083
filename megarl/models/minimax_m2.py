"""MiniMax-M2 (minimax_m2, https://github.com/MiniMax-AI/MiniMax-M2): grouped-query attention that rotates a part of each head and
normalises queries and keys over all heads together, and in every layer a mixture of gated experts, which a sigmoid router chooses by score
plus bias.

Its multi-token prediction (three further layers) is not trained here. transformers has no class for its classifiers, so only megarl can
load a saved critic or reward model. Refused: linear attention (attn_type_list), shared experts, routers without a bias, norms of single
heads, YaRN, and what every family refuses (`decoder.refuse`).
"""

from functools import partial
from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.rope import Rope, rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

NAME = "MiniMax-M2"

DEFAULTS: dict[str, Any] = {  # of transformers' MiniMaxM2Config
    **decoder.COMMON,
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0,
    "rotary_dim": None,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "router_jitter_noise": 0.0,
    "num_nextn_predict_layers": 0,
    # transformers has no other way; vLLM without these keys would have one
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}


def turned(config: ConfigJson) -> Rope:
    """Return the rotary embedding, whose part of each head published checkpoints give as `rotary_dim`.

    Raises ConfigError if config.json also gives it in another way, and differently.
    """
    width, head = config["rotary_dim"], number(config, "head_dim")
    given = config if width is None else {"partial_rotary_factor": width / head, **config}
    rotation = rope(given, partial=True)
    if width is not None and int(head * rotation.fraction) != width:
        raise ConfigError(
            f"model.path: config.json's rotary_dim={width} is not partial_rotary_factor={rotation.fraction:g} of head_dim={head}"
        )
    return rotation


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    attention: dict[str, Any] = {
        "attn_type_list": [1] * number(config, "num_hidden_layers"),
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }
    router: dict[str, Any] = {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "router_jitter_noise": 0.0,
        "shared_intermediate_size": 0,
    }
    decoder.refuse(NAME, config, attention_bias=False, sliding_window=None, **attention, **router)
    experts, inner = number(config, "num_local_experts"), number(config, "intermediate_size")
    return decoder.sizes(config, experts=experts, expert_ffn=inner)


def mixture(n: Sizes) -> list[WeightMapping]:
    """Return the mappings of the router, its bias and the experts."""
    bias = blocks.expert_bias(n, "block_sparse_moe.e_score_correction_bias")
    return [*blocks.experts(n, "block_sparse_moe.", ("w1", "w3", "w2")), bias]


FAMILY = decoder_family(
    "MiniMaxM2",
    sizes,
    DEFAULTS,
    mlps=mixture,
    fields=partial(decoder.plain_sigmoid_fields, NAME),
    rope=turned,
    norm="all_heads",
    known=False,
    predictors=blocks.predictors,
    spellings={"num_experts": "num_local_experts", "num_mtp_modules": "num_nextn_predict_layers"},
)
