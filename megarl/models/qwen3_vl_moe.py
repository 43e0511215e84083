"""Qwen3-VL-MoE (https://arxiv.org/abs/2511.21631): Qwen3-MoE with multimodal RoPE, after a vision tower (`vision`).

Published models stack each layer's experts in two tensors, whose matrices are transposed: [experts, hidden, 2 ffn], gate before up, and
[experts, ffn, hidden]. That is what vLLM reads, and what is written. transformers 5 saves [experts, 2 ffn, hidden] and
[experts, hidden, ffn], which are read, too; matrices that are square, where the two cannot be told apart, are refused.

Refused: dense layers, probabilities that are not normalised (transformers' class always does), and what `qwen3_vl` refuses.
"""

from dataclasses import replace
from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder, qwen3_moe, vision
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson
from megarl.models.decoder_blocks import EXPERT
from megarl.models.family import scalar_head
from megarl.models.sizes import Sizes
from megarl.models.weight_map import BLOCK, LAYER, WeightMapping
from megarl.models.weight_ops import GateUpColumns, Plain, Transposed

DEFAULTS: dict[str, Any] = {  # of transformers' Qwen3VLMoeConfig and Qwen3VLMoeTextConfig
    **qwen3_moe.DEFAULTS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": True,
    "image_token_id": 151655,
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    decoder.refuse("Qwen3-VL-MoE", config, norm_topk_prob=True)
    n = qwen3_moe.sizes(config)
    if n.hidden in (n.expert_ffn, 2 * n.expert_ffn):
        raise ConfigError(
            f"model.path: config.json's hidden_size={n.hidden} and moe_intermediate_size={n.expert_ffn} give square stacks of experts, in "
            "which transformers 4 and 5 write rows and columns the other way round, and nobody can tell which"
        )
    return vision.with_vision(n, config)


def backbone(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    router, expert = BLOCK + "mlp.gate.weight", BLOCK + "mlp.experts.{expert}."
    mixture = [
        WeightMapping(LAYER + "mlp.router.weight", (router,), Plain((n.experts, n.hidden))),
        WeightMapping(EXPERT + "linear_fc1.weight", (expert + "gate_up_proj",), GateUpColumns(n.expert_ffn, n.hidden)),
        WeightMapping(EXPERT + "linear_fc2.weight", (expert + "down_proj",), Transposed(n.hidden, n.expert_ffn)),
    ]
    return blocks.backbone(n, blocks.attention(n, norm=True), mixture)


FAMILY = vision.with_tower(
    replace(qwen3_moe.FAMILY, weight_map=backbone),
    sizes,
    "Qwen3VLMoeForConditionalGeneration",
    scalar_head("Qwen3VLMoeForSequenceClassification", sizes, known=False),
    defaults=DEFAULTS,
    stacked=True,
    hidden_axes={"gate_up_proj": 0, "down_proj": 1},
)
