"""Qwen3.5 and 3.6, dense, and what they share with the mixtures (`qwen3_5_moe_text`): Qwen3-Next's layers, with the projections of a gated
delta net in four tensors.

Published models also see images (`qwen3_5`). With `model.drop_images` they are read as transformers' text class does: `text_config` of
config.json, and the tensors `model.language_model.*` (`Family.images`). A token of text has the same position on all axes of multimodal
RoPE, which is then the plain one. Refused: attention without gates, biases, and what every family refuses (`decoder.refuse`).
"""

from functools import partial
from typing import Any

from megarl.models import decoder, delta_nets
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family, Images, scalar_head
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

turned = partial(rope, partial=True)

DECODER: dict[str, Any] = {  # of transformers' Qwen3_5TextConfig and Qwen3_5MoeTextConfig
    **decoder.COMMON,
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mtp_num_hidden_layers": 0,
    **delta_nets.DEFAULTS,
}
DEFAULTS: dict[str, Any] = {
    **DECODER,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}


def decoder_sizes(config: ConfigJson, **mlp: Any) -> Sizes:
    """Return the sizes of a decoder; `mlp`: those of its MLPs and experts. Raise ConfigError for what its weight map does not support."""
    decoder.refuse("Qwen3.5", {**config, "layer_types": None}, attention_bias=False, attn_output_gate=True, mlp_only_layers=[])
    return decoder.sizes(config, linear_heads=delta_nets.key_heads(config), **mlp)


def decoder_fields(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig, without those of experts."""
    return {**decoder.fields(config, n, turned(config), norm=True), **delta_nets.fields(config)}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    return decoder_sizes(config, ffn=number(config, "intermediate_size"))


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return delta_nets.backbone(config, n, blocks.dense_mlps(n), by_head=False)


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    return decoder_fields(config, sizes(config))


FAMILY = Family(
    heads={"lm": blocks.lm_head("Qwen3_5ForCausalLM", sizes), "value": scalar_head("Qwen3_5TextForSequenceClassification", sizes)},
    sizes=sizes,
    weight_map=weight_map,
    rope=turned,
    fields=fields,
    defaults=DEFAULTS,
    predictors=delta_nets.predictors,
    predictor=delta_nets.predictor,
    images=Images("Qwen3_5ForConditionalGeneration", "model.language_model.", "model.visual."),
)
