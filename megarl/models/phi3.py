"""Phi-3's architecture as used by Phi-4 (https://arxiv.org/abs/2404.14219, https://arxiv.org/abs/2412.08905): Llama's, with query, key and
value in one tensor, and gate and up projection in another.

In Phi-3-mini-4k all layers have a sliding window. Refused: every scaled RoPE (longrope: Phi-4-mini and the 128k models; transformers treats
"yarn" as longrope), biases, and what every family refuses (`decoder.refuse`).
"""

from functools import partial
from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder, mistral
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.rope import Rope, rope
from megarl.models.sizes import Sizes

NAME = "Phi-3"

DEFAULTS: dict[str, Any] = {  # of transformers' Phi3Config
    **decoder.COMMON,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support: biases, other activations."""
    decoder.refuse(NAME, config, windows=True, attention_bias=False, mlp_bias=False, resid_pdrop=0.0, embd_pdrop=0.0)
    return decoder.sizes(config, ffn=number(config, "intermediate_size"))


def plain_rope(config: ConfigJson) -> Rope:
    """Return the unscaled RoPE, which config.json may limit to a part of each head. Raise ConfigError for a scaled one."""
    plain = rope(config, partial=True)
    if plain.kind != "default":
        raise ConfigError(f"model.path: RoPE of type {plain.kind!r} is not supported for {NAME}: 'default' is")
    return plain


FAMILY = decoder_family(
    "Phi3", sizes, DEFAULTS, mlps=partial(blocks.dense_mlps, fused=True), fields=mistral.windows, rope=plain_rope, fused=True
)
