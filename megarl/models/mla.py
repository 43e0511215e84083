"""Multi-latent attention (MLA, https://arxiv.org/abs/2405.04434): keys and values of all heads come from one small latent for each token,
queries from another or directly. What its families share: sizes, weight map and Megatron's fields.
"""

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.rope import Rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import BLOCK, LAYER, WeightMapping
from megarl.models.weight_ops import Plain

# Of the norms of latents, whatever rms_norm_eps says: the published code and transformers give them none, so that it is their default.
LATENT_EPSILON = 1e-6


def sizes(family: str, config: ConfigJson, mlp: dict[str, int | None], **expected: Any) -> Sizes:
    """Return the sizes of a decoder with MLA. Raise ConfigError for what the weight map and Megatron's MLA do not support.

    Args:
        family: its name, for the message.
        config: config.json.
        mlp: the sizes of its MLPs and experts.
        **expected: the only supported value of further keys.
    """
    decoder.refuse(family, config, attention_bias=False, rope_interleave=True, moe_layer_freq=1, **expected)
    heads, groups, rotary = number(config, "num_attention_heads"), config["num_key_value_heads"], number(config, "qk_rope_head_dim")
    if groups not in (None, heads):
        raise ConfigError(f"model.path: config.json's num_key_value_heads={groups!r} is not num_attention_heads={heads}")
    if config.get("head_dim", rotary) != rotary:  # transformers would rotate that many dimensions
        raise ConfigError(f"model.path: config.json's head_dim={config['head_dim']!r} is not qk_rope_head_dim={rotary!r}")
    return Sizes(
        layers=number(config, "num_hidden_layers"),
        hidden=number(config, "hidden_size"),
        heads=heads,
        groups=heads,
        head_dim=number(config, "qk_nope_head_dim") + rotary,
        vocab=number(config, "vocab_size"),
        **mlp,  # type: ignore[arg-type]
    )


def weight_map(config: ConfigJson, n: Sizes, *, bias: bool) -> list[WeightMapping]:
    """Return the weight map of a backbone with MLA, dense first layers, and routed and shared experts.

    Args:
        config: config.json.
        n: the model's sizes.
        bias: the router has an expert bias.
    """
    before, after = blocks.norms(n)
    return [blocks.embedding(n), before, *_latents(config, n), after, *blocks.shared_experts(n, bias=bias), blocks.final_norm(n)]


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


def fields(family: str, config: ConfigJson, n: Sizes, rope: Rope) -> dict[str, Any]:
    """Return the fields of Megatron's MLATransformerConfig, without those of the experts.

    Args:
        family: its name, for the message.
        config: config.json.
        n: the model's sizes.
        rope: its rotary embedding.
    """
    return {
        **decoder.fields(config, n, Rope("default", rope.theta, 1.0, {}), norm=True),
        "multi_latent_attention": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": number(config, "kv_lora_rank"),
        "qk_head_dim": number(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": number(config, "qk_rope_head_dim"),
        "v_head_dim": number(config, "v_head_dim"),
        "kv_channels": number(config, "v_head_dim"),
        "apply_rope_fusion": False,
        **_rope_fields(family, rope),
    }


def _rope_fields(family: str, rope: Rope) -> dict[str, Any]:
    """Return the RoPE fields of Megatron's MLA, which computes its own frequencies, plain or YaRN's, with the formulas of transformers.

    Raises ConfigError for a RoPE that it cannot compute.
    """
    common = {"rotary_base": rope.theta, "rotary_percent": 1.0}
    if rope.kind == "default":
        return {**common, "rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
    given = rope.numbers
    one, two = given.get("mscale") or 0.0, given.get("mscale_all_dim") or 0.0
    if rope.kind != "yarn" or given.get("attention_factor") is not None or not given.get("truncate", True):
        raise ConfigError(f"model.path: config.json's RoPE {dict(given)} is not supported for {family}: 'default' and plain 'yarn' are")
    if two and not one:  # mscale_all_dim then scales the scores but not cosine and sine, which Megatron cannot do
        raise ConfigError(f"model.path: config.json's RoPE has mscale_all_dim={two:g} without mscale, which is not supported for {family}")
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
