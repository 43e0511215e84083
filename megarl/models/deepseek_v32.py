"""DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): DeepSeek-V3 with sparse attention, whose indexer is frozen: it gets no gradient.

Its multi-token prediction (one further layer) is not trained here. transformers has no class for its classifiers, so only megarl can load a
saved critic or reward model. Refused: what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.models import decoder, deepseek_v3, indexer
from megarl.models.config_json import ConfigJson
from megarl.models.sizes import Sizes

NAME = "DeepSeek-V3.2"

DEFAULTS: dict[str, Any] = {  # of transformers' DeepseekV32Config
    **deepseek_v3.DEFAULTS,
    "max_position_embeddings": 163840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map and Megatron's MLA do not support."""
    return indexer.sizes(NAME, config, interleaved=False)


FAMILY = deepseek_v3.alike(NAME, "DeepseekV32", sizes, DEFAULTS, spellings={**decoder.SIGMOID_SPELLINGS, "num_experts": "n_routed_experts"})
