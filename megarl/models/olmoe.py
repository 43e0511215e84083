"""OLMoE (https://arxiv.org/abs/2409.02060): attention that normalises queries and keys over all heads together, and in every layer a
mixture of gated experts, weighted by their probabilities as they are.

transformers has no class for its classifiers, so only megarl can load a saved critic or reward model. Refused: clipped queries, keys and
values, biases, and what every family refuses (`decoder.refuse`).
"""

from functools import partial
from typing import Any

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes

NAME = "OLMoE"

DEFAULTS: dict[str, Any] = {  # of transformers' OlmoeConfig
    **decoder.COMMON,
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    # vLLM 0.30.0 has these two values in its code (models/olmoe.py:94, :164), whatever config.json says.
    decoder.refuse(NAME, config, attention_bias=False, clip_qkv=None, rms_norm_eps=1e-5, norm_topk_prob=False)
    experts, inner = number(config, "num_experts"), number(config, "intermediate_size")
    n = decoder.sizes(config, experts=experts, expert_ffn=inner)
    decoder.check_head_dim(n)  # transformers' norms have the hidden size
    return n


FAMILY = decoder_family(
    "Olmoe",
    sizes,
    DEFAULTS,
    mlps=blocks.experts,
    fields=partial(decoder.softmax_fields, normalized=False),
    norm="all_heads",
    known=False,
    spellings={"num_local_experts": "num_experts"},
)
