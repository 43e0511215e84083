"""Mixtral (https://arxiv.org/abs/2401.04088): grouped-query attention, and in every layer a mixture of gated experts whose router scales
the probabilities of the chosen experts to a sum of 1.

Refused: sliding windows, and what every family refuses (`decoder.refuse`).
"""

from functools import partial
from typing import Any

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.sizes import Sizes

DEFAULTS: dict[str, Any] = {  # of transformers' MixtralConfig
    **decoder.COMMON,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "router_jitter_noise": 0.0,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: sliding windows, other activations."""
    decoder.refuse("Mixtral", config, sliding_window=None, router_jitter_noise=0.0)
    experts, inner = number(config, "num_local_experts"), number(config, "intermediate_size")
    return decoder.sizes(config, experts=experts, expert_ffn=inner)


FAMILY = decoder_family(
    "Mixtral",
    sizes,
    DEFAULTS,
    mlps=partial(blocks.experts, theirs="block_sparse_moe.", names=("w1", "w3", "w2")),
    fields=partial(decoder.softmax_fields, normalized=True),
    spellings={"num_experts": "num_local_experts"},
)
