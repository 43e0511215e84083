"""GLM-4.5 (glm4_moe, https://arxiv.org/abs/2508.06471): grouped-query attention that rotates half of each head, and DeepSeek-V3's experts
and router.

transformers has no class for its classifiers, so only megarl can load a saved critic or reward model. Refused: YaRN, whose scale would also
affect the part of the head that is not rotated, and what every family refuses (`decoder.refuse`).
"""

from functools import partial
from typing import Any

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson
from megarl.models.family import Family
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

NAME = "GLM-4.5-MoE"
turned = partial(rope, partial=True)

DEFAULTS: dict[str, Any] = {  # of transformers' Glm4MoeConfig
    **decoder.COMMON,
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": None,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "use_qk_norm": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    decoder.refuse(NAME, config)
    return decoder.sizes(config, **decoder.shared_sizes(config))


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    return blocks.backbone(n, blocks.attention(n, **_attention(config)), blocks.shared_experts(n, bias=True))


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    n = sizes(config)
    return {**decoder.fields(config, n, turned(config), **_attention(config)), **decoder.sigmoid_fields(NAME, config, n)}


def _attention(config: ConfigJson) -> dict[str, Any]:
    """Return the arguments of `attention`: the large model has biases and norms, GLM-4.5-Air only biases.

    The output projection has no bias in either.
    """
    return {"bias": config["attention_bias"], "norm": config["use_qk_norm"]}


FAMILY = Family(
    heads=blocks.heads("Glm4Moe", sizes, known=False),
    sizes=sizes,
    weight_map=weight_map,
    rope=turned,
    fields=fields,
    defaults=DEFAULTS,
    predictors=blocks.predictors,
    predictor=blocks.predictor,
    spellings=decoder.SIGMOID_SPELLINGS,
)
