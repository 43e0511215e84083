"""DeepSeek-V2 and V2-Lite (https://arxiv.org/abs/2405.04434): attention through low-rank latents (MLA), dense first layers, then shared
experts and routed experts, which a softmax router chooses by score, within the groups of the highest scores (group_limited_greedy) or
among all (greedy). V2-Lite has no latent of queries.

The chosen experts' probabilities are multiplied by routed_scaling_factor as they are. Refused: norm_topk_prob=true, which the published
code takes for a sum of 1 without the factor, vLLM for one with it, and transformers not at all; and what every family refuses
(`decoder.refuse`).
"""

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder, mla
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson
from megarl.models.family import Family
from megarl.models.rope import rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping

NAME = "DeepSeek-V2"
METHODS = ("greedy", "group_limited_greedy")

DEFAULTS: dict[str, Any] = {  # of transformers' DeepseekV2Config
    **decoder.COMMON,
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "n_group": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0,
    "topk_group": None,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "v_head_dim": 128,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    # transformers has no other way; vLLM without this key would have the same
    "scoring_func": "softmax",
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map and Megatron's MLA do not support."""
    if config["topk_method"] not in METHODS:
        raise ConfigError(f"model.path: config.json's topk_method={config['topk_method']!r} is none of {', '.join(METHODS)}")
    expected = {"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False}
    return mla.sizes(NAME, config, decoder.shared_sizes(config), **expected)


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    return mla.weight_map(config, sizes(config), bias=False)


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's MLATransformerConfig."""
    n = sizes(config)
    return {
        **mla.fields(NAME, config, n, rope(config)),
        **decoder.softmax_fields(config, n, normalized=False),
        **decoder.shared_fields(config, n, grouped=config["topk_method"] != "greedy"),
    }


FAMILY = Family(
    heads=blocks.heads("DeepseekV2", sizes),
    sizes=sizes,
    weight_map=weight_map,
    fields=fields,
    defaults=DEFAULTS,
    nullable=("q_lora_rank",),
    spellings={"num_experts": "n_routed_experts"},
    layer_spec=mla.layer_spec,
)
