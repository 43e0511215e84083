"""GLM-5 and 5.1 (glm_moe_dsa, https://huggingface.co/zai-org/GLM-5): DeepSeek-V3.2's parts in other sizes, with the indexer's RoPE over
neighbouring dimensions.

Refused: layers that share the keys which another layer has chosen (GLM-5.2), and what DeepSeek-V3.2 refuses.
"""

from typing import Any

from megarl.models import decoder, deepseek_v3, deepseek_v32, indexer
from megarl.models.config_json import ConfigJson, number
from megarl.models.sizes import Sizes

NAME = "GLM-5"

DEFAULTS: dict[str, Any] = {  # of transformers' GlmMoeDsaConfig
    **deepseek_v32.DEFAULTS,
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map and Megatron's MLA do not support."""
    whole = {"index_topk_freq": 1, "index_topk_pattern": None, "indexer_types": ["full"] * number(config, "num_hidden_layers")}
    return indexer.sizes(NAME, config, interleaved=True, **whole)


FAMILY = deepseek_v3.alike(NAME, "GlmMoeDsa", sizes, DEFAULTS, spellings={**decoder.SIGMOID_SPELLINGS, "num_experts": "n_routed_experts"})
