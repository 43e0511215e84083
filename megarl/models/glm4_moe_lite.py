"""GLM-4.7-Flash (glm4_moe_lite, https://huggingface.co/zai-org/GLM-4.7-Flash): DeepSeek-V3's attention, experts and router in another size.

Its multi-token prediction (one further layer) is not trained here. transformers has no class for its classifiers, so only megarl can load a
saved critic or reward model. Refused: what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder, deepseek_v3, mla
from megarl.models.config_json import ConfigJson
from megarl.models.sizes import Sizes

NAME = "GLM-4.7-Flash"

DEFAULTS: dict[str, Any] = {  # of transformers' Glm4MoeLiteConfig
    **decoder.COMMON,
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "attention_bias": False,
    # which transformers' class does not read: its first layer is dense unless mlp_layer_types says otherwise
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map and Megatron's MLA do not support."""
    n = mla.sizes(NAME, config, decoder.shared_sizes(config), scoring_func="sigmoid", topk_method="noaux_tc")
    decoder.check_mlp_layer_types(config, n, 1)
    return n


FAMILY = deepseek_v3.alike(
    NAME, "Glm4MoeLite", sizes, DEFAULTS, nullable=("q_lora_rank",), spellings={"num_local_experts": "n_routed_experts"}
)
