"""DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437), Kimi-K2 (https://arxiv.org/abs/2507.20534) and Moonlight
(https://arxiv.org/abs/2502.16982): attention through low-rank latents (MLA), dense first layers, then shared experts and routed experts,
which a sigmoid router chooses by score plus bias, within groups.

Kimi-K2 has one group and another model_type, Moonlight plain RoPE and no latent of queries. Refused: what every family refuses
(`decoder.refuse`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from megarl.models import decoder, indexer, mla
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson
from megarl.models.family import Family
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

NAME = "DeepSeek-V3"

DEFAULTS: dict[str, Any] = {  # of transformers' DeepseekV3Config
    **decoder.COMMON,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
    # transformers has no other way; vLLM without these keys would have one
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map and Megatron's MLA do not support."""
    return mla.sizes(NAME, config, decoder.shared_sizes(config), scoring_func="sigmoid", topk_method="noaux_tc")


def alike(
    name: str, classes: str, sizes: Callable[[ConfigJson], Sizes], defaults: Mapping[str, Any], *, known: bool = False, **others: Any
) -> Family:
    """Return a family of DeepSeek-V3's layers, with sparse attention where its sizes have an indexer.

    Args:
        name: its name, for messages.
        classes: as `name` of `decoder_blocks.heads`.
        sizes: as in `Family`.
        defaults: as in `Family`.
        known: as of `decoder_blocks.heads`.
        **others: further fields of the family.
    """

    def weight_map(config: ConfigJson) -> list[WeightMapping]:
        n = sizes(config)
        return [*mla.weight_map(config, n, bias=True), *(indexer.weight_map(config, n) if n.indexer is not None else [])]

    def fields(config: ConfigJson) -> dict[str, Any]:
        n = sizes(config)
        own = indexer.fields(n) if n.indexer is not None else {}
        return {**mla.fields(name, config, n, rope(config)), **decoder.sigmoid_fields(name, config, n), **own}

    return Family(
        heads=blocks.heads(classes, sizes, known=known),
        sizes=sizes,
        weight_map=weight_map,
        fields=fields,
        defaults=defaults,
        predictors=blocks.predictors,
        layer_spec=mla.layer_spec,
        **others,
    )


FAMILY = alike(
    NAME,
    "DeepseekV3",
    sizes,
    DEFAULTS,
    known=True,
    nullable=("num_key_value_heads", "q_lora_rank"),
    predictor=blocks.predictor,
    spellings=decoder.SIGMOID_SPELLINGS,
    names=("kimi_k2",),
)
