"""DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437), and Kimi-K2 (https://arxiv.org/abs/2507.20534), the same under another name:
attention through low-rank latents (MLA), dense first layers, then shared experts and routed experts, which a sigmoid router chooses by
score plus bias, within groups.

Their multi-token prediction (one further layer) is not trained here. Refused: routers other than the sigmoid one (DeepSeek-V2), groups that
Megatron would score differently, and what every family refuses (`decoder_blocks.refuse`).
"""

from __future__ import annotations

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson
from megarl.models.decoder_blocks import BLOCK, LAYER, number
from megarl.models.rope import Rope, rope
from megarl.models.weight_map import Family, Plain, Sizes, WeightMapping, scalar_head

NAME = "DeepSeek-V3"

DEFAULTS: dict[str, Any] = {  # of transformers' DeepseekV3Config
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
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 1,
    # transformers has no other way; vLLM without these keys would have one
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map and Megatron's MLA do not support."""
    router: dict[str, Any] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    blocks.refuse(NAME, config, attention_bias=False, rope_interleave=True, moe_layer_freq=1, **router)
    heads, groups, rotary = number(config, "num_attention_heads"), config["num_key_value_heads"], config["qk_rope_head_dim"]
    if groups not in (None, heads):
        raise ConfigError(f"model.path: config.json's num_key_value_heads={groups!r} is not num_attention_heads={heads}")
    if config["rms_norm_eps"] != 1e-6:  # transformers always normalises the latents with 1e-6, Megatron with config.json's value
        raise ConfigError(f"model.path: config.json's rms_norm_eps={config['rms_norm_eps']!r} is not supported for {NAME}, which has 1e-06")
    if config.get("head_dim", rotary) != rotary:  # transformers would rotate that many dimensions
        raise ConfigError(f"model.path: config.json's head_dim={config['head_dim']!r} is not qk_rope_head_dim={rotary!r}")
    return Sizes(
        layers=number(config, "num_hidden_layers"),
        hidden=number(config, "hidden_size"),
        heads=heads,
        groups=heads,
        head_dim=number(config, "qk_nope_head_dim") + number(config, "qk_rope_head_dim"),
        vocab=number(config, "vocab_size"),
        **blocks.sigmoid_sizes(config),  # type: ignore[arg-type]
    )


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    before, after = blocks.norms(n)
    return [blocks.embedding(n), before, *_latents(config, n), after, *blocks.sigmoid_experts(n), blocks.final_norm(n)]


def _latents(config: ConfigJson, n: Sizes) -> list[WeightMapping]:
    """Return the mappings of MLA: down-projections to the latents are replicated on all tensor-parallel ranks, the others split by head."""
    ours, theirs = LAYER + "self_attention.", BLOCK + "self_attn."
    query, latent, value = n.heads * n.head_dim, number(config, "kv_lora_rank"), number(config, "v_head_dim")
    keys_values = n.heads * (number(config, "qk_nope_head_dim") + value)
    if config["q_lora_rank"] is None:
        queries = [WeightMapping(ours + "linear_q_proj.weight", (theirs + "q_proj.weight",), Plain((query, n.hidden), 0))]
    else:
        rank = number(config, "q_lora_rank")
        queries = [
            WeightMapping(ours + "linear_q_down_proj.weight", (theirs + "q_a_proj.weight",), Plain((rank, n.hidden))),
            WeightMapping(ours + "q_layernorm.weight", (theirs + "q_a_layernorm.weight",), Plain((rank,))),
            WeightMapping(ours + "linear_q_up_proj.weight", (theirs + "q_b_proj.weight",), Plain((query, rank), 0)),
        ]
    down = Plain((latent + number(config, "qk_rope_head_dim"), n.hidden))
    return [
        *queries,
        WeightMapping(ours + "linear_kv_down_proj.weight", (theirs + "kv_a_proj_with_mqa.weight",), down),
        WeightMapping(ours + "kv_layernorm.weight", (theirs + "kv_a_layernorm.weight",), Plain((latent,))),
        WeightMapping(ours + "linear_kv_up_proj.weight", (theirs + "kv_b_proj.weight",), Plain((keys_values, latent), 0)),
        WeightMapping(ours + "linear_proj.weight", (theirs + "o_proj.weight",), Plain((n.hidden, n.heads * value), 1)),
    ]


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's MLATransformerConfig."""
    n = sizes(config)
    turned = rope(config)
    return {
        **blocks.decoder_fields(config, n, Rope("default", turned.theta, 1.0, {}), norm=True),
        **blocks.sigmoid_fields(NAME, config, n),
        "multi_latent_attention": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": number(config, "kv_lora_rank"),
        "qk_head_dim": number(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": number(config, "qk_rope_head_dim"),
        "v_head_dim": number(config, "v_head_dim"),
        "kv_channels": number(config, "v_head_dim"),
        "apply_rope_fusion": False,
        **_rope_fields(turned),
    }


def _rope_fields(rope: Rope) -> dict[str, Any]:
    """Return the RoPE fields of Megatron's MLA, which computes its own frequencies, plain or YaRN's, with the formulas of transformers.

    Raises ConfigError for a RoPE that it cannot compute.
    """
    common = {"rotary_base": rope.theta, "rotary_percent": 1.0}
    if rope.kind == "default":
        return {**common, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    given = rope.numbers
    one, two = given.get("mscale") or 0.0, given.get("mscale_all_dim") or 0.0
    if rope.kind != "yarn" or given.get("attention_factor") is not None or not given.get("truncate", True):
        raise ConfigError(f"model.path: config.json's RoPE {dict(given)} is not supported for {NAME}: 'default' and plain 'yarn' are")
    if two and not one:  # mscale_all_dim then scales the scores but not cosine and sine, which Megatron cannot do
        raise ConfigError(f"model.path: config.json's RoPE has mscale_all_dim={two:g} without mscale, which is not supported for {NAME}")
    return {
        **common,
        "rope_type": "yarn",
        "rotary_scaling_factor": float(given["factor"]),
        "original_max_position_embeddings": given["original_max_position_embeddings"],
        "beta_fast": float(given.get("beta_fast") or 32),
        "beta_slow": float(given.get("beta_slow") or 1),
        "mscale": float(one if two else 1.0),
        "mscale_all_dim": float(two),
    }


def layer_spec(layer: Any, backend: Any) -> None:
    """Replicate the down-projections to the latents on every tensor-parallel rank, as the weight map above does."""
    attention = layer.submodules.self_attention.submodules
    attention.linear_q_down_proj = attention.linear_kv_down_proj = backend.replicated_linear


FAMILY = Family(
    heads={
        "lm": blocks.lm_head("DeepseekV3ForCausalLM", sizes),
        "value": scalar_head("DeepseekV3ForSequenceClassification", sizes),
    },
    sizes=sizes,
    weight_map=weight_map,
    rope=rope,
    fields=fields,
    defaults=DEFAULTS,
    nullable=("num_key_value_heads", "q_lora_rank"),
    optional=blocks.unused,
    predictors=blocks.predictors,
    spellings=blocks.SIGMOID_SPELLINGS,
    names=("kimi_k2",),
    layer_spec=layer_spec,
)
