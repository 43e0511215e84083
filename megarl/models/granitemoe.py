"""Granite-3-MoE and PowerMoE (https://arxiv.org/abs/2408.13359): grouped-query attention, and in every layer a mixture of gated experts,
whose router's softmax is over the chosen ones. Numbers of config.json scale the embeddings, the attention's scores, what a layer adds to
the residual stream, and the logits:

    x_0 = embedding_multiplier E[token]
    x = x + residual_multiplier f(norm(x)), for attention and mixture; the attention's scores are attention_multiplier q k
    logits = W norm(x) / logits_scaling

A layer's experts are stored as two tensors, `input_linear` (gate and up) and `output_linear`. transformers has no class for its
classifiers, so only megarl can load a saved critic or reward model. Refused: biases, and what every family refuses
(`decoder.refuse`).
"""

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_family import decoder_family
from megarl.models.family import Multipliers
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import BLOCK, LAYER, WeightMapping
from megarl.models.weight_ops import Fused, GateUp, Plain

NAME = "Granite-MoE"
FACTORS = {"embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0}
# vLLM reads these, and transformers' class does not (models/granite.py:88).
UNIFORM: dict[str, Any] = {"layer_types": None, "layer_rope_theta": None, "attention_sinks": None}

DEFAULTS: dict[str, Any] = {  # of transformers' GraniteMoeConfig
    **decoder.COMMON,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    **FACTORS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    decoder.refuse(NAME, config, **UNIFORM, attention_bias=False)
    experts, inner = number(config, "num_local_experts"), number(config, "intermediate_size")
    n = decoder.sizes(config, experts=experts, expert_ffn=inner)
    decoder.check_head_dim(n)  # vLLM derives it
    return n


def mixture(n: Sizes) -> list[WeightMapping]:
    """Return the mappings of the router and of the experts."""
    theirs = BLOCK + "block_sparse_moe."
    both, down = (f"{theirs}{name}_linear.{{expert}}.weight" for name in ("input", "output"))
    return [
        WeightMapping(LAYER + "mlp.router.weight", (theirs + "router.layer.weight",), Plain((n.experts, n.hidden))),
        WeightMapping(blocks.EXPERT + "linear_fc1.weight", (both,), Fused(GateUp(n.expert_ffn, n.hidden))),
        WeightMapping(blocks.EXPERT + "linear_fc2.weight", (down,), Plain((n.hidden, n.expert_ffn), 1)),
    ]


def multipliers(config: ConfigJson) -> Multipliers:
    """Return the factors of embeddings, residual stream and logits. Raise ConfigError for one that is not positive."""
    return Multipliers(
        embedding=_positive(config, "embedding_multiplier"),
        residual=_positive(config, "residual_multiplier"),
        logits=1.0 / _positive(config, "logits_scaling"),
    )


def factors(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the field of the attention scores' factor, that of the rotation included. Raise ConfigError for one that is not positive."""
    multipliers(config)
    return {"softmax_scale": _positive(config, "attention_multiplier") * rope(config).attention_factor ** 2}


def fields(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig beside those of a dense decoder. Raise ConfigError as `factors` does."""
    return {**decoder.softmax_fields(config, n, normalized=True), **factors(config, n)}


def _positive(config: ConfigJson, key: str) -> float:
    if not isinstance(config[key], int | float) or isinstance(config[key], bool) or not 0 < config[key] < float("inf"):
        raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200} is not a positive number")
    return float(config[key])


FAMILY = decoder_family(
    "GraniteMoe",
    sizes,
    DEFAULTS,
    mlps=mixture,
    fields=fields,
    known=False,
    multipliers=multipliers,
    spellings={"num_experts": "num_local_experts"},
    stacked=True,
)
