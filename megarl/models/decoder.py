"""What config.json says of a decoder: its sizes, Megatron's fields for what `decoder_blocks` has the weight maps of, and what is refused.

A family's file states which of these it uses, and whatever is specific to the family.
"""

from typing import Any

from megarl.errors import ConfigError
from megarl.models.config_json import ConfigJson, number
from megarl.models.quantized import quantization
from megarl.models.rope import Rope
from megarl.models.sizes import Sizes

# Other spellings of keys by `shared_sizes` and `decoder_blocks.predictors`, which transformers accepts.
SIGMOID_SPELLINGS = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
# Defaults of config.json's keys in most of transformers' classes.
COMMON: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "tie_word_embeddings": False, "rope_theta": 10000.0}
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of attention in config.json's layer_types


def refuse(family: str, config: ConfigJson, *, windows: bool = False, kind: str = FULL, **expected: Any) -> None:
    """Raise ConfigError for a key of config.json whose value is not null and that the family's weight map and Megatron do not support.

    Refused for every family: activations other than silu, dropout, settings of single layers, and weights that are quantised in ways that
    `quantized` cannot read.

    Args:
        family: its name, for the message.
        config: config.json.
        windows: the family has sliding windows (`window_fields`); in the others they are refused.
        kind: in the others, what layer_types call the attention of each layer.
        **expected: the only supported value of further keys.
    """
    always = {"hidden_act": "silu", "attention_dropout": 0.0, "per_layer_config": None}
    for key, value in {**always, **({} if windows else {"use_sliding_window": False}), **expected}.items():
        if config.get(key) not in (None, value):
            hint = " (null turns it off)" if key == "sliding_window" else ""
            raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200} is not supported for {family}{hint}")
    quantization(config)
    types = config.get("layer_types")
    if not windows and types is not None and types != [kind] * number(config, "num_hidden_layers"):
        raise ConfigError(f"model.path: config.json's layer_types are not all {kind!r}, one for each layer, as supported for {family}")


def window_of(config: ConfigJson) -> int | None:
    """Return the number of tokens that a layer with a sliding window sees, its own among them; None if no layer has one.

    A query at position i sees the keys at i - window + 1 to i (transformers/masking_utils.py:90: kv_idx > q_idx - sliding_window).
    """
    return None if config["sliding_window"] is None else number(config, "sliding_window")


def layer_types(config: ConfigJson, default: list[str] | None = None) -> list[str]:
    """Return each layer's kind of attention, `FULL` or `SLIDING`.

    Args:
        config: config.json.
        default: the kinds where it does not give `layer_types`; None: all layers have the window, if there is one.

    Raises:
        ConfigError: an unknown kind, a list of another length, or sliding layers without a window.
    """
    layers = number(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        types = default if default is not None else [FULL if window_of(config) is None else SLIDING] * layers
    unknown = set(types) - {FULL, SLIDING}
    if unknown or len(types) != layers:
        fault = f"has {min(unknown)!r:.200}" if unknown else f"has {len(types)} entries"
        raise ConfigError(f"model.path: config.json's layer_types {fault}, expected {FULL!r} or {SLIDING!r} for each of {layers} layers")
    if SLIDING in types and window_of(config) is None:
        raise ConfigError(f"model.path: config.json's layer_types have {SLIDING!r}, and its sliding_window is null")
    return list(types)


def uniform_layer_types(config: ConfigJson) -> list[str]:
    """Return the kinds of attention of a family whose `sliding_window` holds for all layers or is null.

    transformers does not read `layer_types` there, and vLLM does (models/llama.py:186), so that one which differs is refused.
    """
    types, own = layer_types(config), FULL if window_of(config) is None else SLIDING
    if set(types) != {own}:
        raise ConfigError(
            f"model.path: config.json's layer_types are not all {own!r}, as its sliding_window={config['sliding_window']!r} says, and "
            f"{config['architectures'][0]} does not read them in transformers"
        )
    return types


def window_fields(config: ConfigJson, types: list[str]) -> dict[str, Any]:
    """Return the TransformerConfig fields of sliding windows: how far a query sees to its left, and in which layers (`types`).

    Megatron's window is that of Transformer Engine, whose bounds are inclusive: queries at i see keys from i - left to i (version 2.18,
    pytorch/attention/dot_product_attention/dot_product_attention.py:269). A window of W tokens is thus W - 1 to the left.
    """
    window = window_of(config)
    if window is None or SLIDING not in types:
        return {}
    mixed = {} if FULL not in types else {"window_attn_skip_freq": [int(kind == SLIDING) for kind in types]}  # 1: the layer has a window
    return {"window_size": (window - 1, 0), **mixed}


def sizes(config: ConfigJson, **mlp: Any) -> Sizes:
    """Return the sizes of a decoder with grouped-query attention; `mlp`: those of its MLPs and experts. Raise ConfigError if invalid."""
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    groups = heads if config.get("num_key_value_heads") is None else number(config, "num_key_value_heads")
    if heads % groups:
        raise ConfigError(f"model.path: config.json's num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    return Sizes(
        layers=number(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=groups,
        head_dim=number(config, "head_dim") if config.get("head_dim") is not None else hidden // heads,
        vocab=number(config, "vocab_size"),
        **mlp,
    )


def check_head_dim(n: Sizes) -> None:
    """Raise ConfigError unless the heads have the hidden size together."""
    if n.heads * n.head_dim != n.hidden:
        raise ConfigError(f"model.path: config.json's head_dim={n.head_dim} is not hidden_size={n.hidden} / num_attention_heads={n.heads}")


def check_one_predictor(config: ConfigJson, key: str) -> None:
    """Raise ConfigError unless config.json has one multi-token prediction layer: what a second one reads is not the same everywhere."""
    if config[key] != 1:
        raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200}: model.mtp=train takes 1")


def fields(config: ConfigJson, n: Sizes, rope: Rope, *, bias: bool = False, norm: bool = False) -> dict[str, Any]:
    """Return the TransformerConfig fields of a dense decoder.

    Args:
        config: config.json.
        n: the model's sizes.
        rope: its rotary embedding.
        bias: query, key and value have biases.
        norm: each head's query and key are normalised.

    Raises:
        ConfigError: the rotary embedding is not supported.
    """
    if rope.attention_factor != 1.0 and rope.fraction != 1.0:
        raise ConfigError(f"model.path: RoPE of type {rope.kind!r} with partial_rotary_factor={rope.fraction:g} is not supported")
    return {
        "num_layers": n.layers,
        "hidden_size": n.hidden,
        "num_attention_heads": n.heads,
        "num_query_groups": n.groups,
        "kv_channels": n.head_dim,
        "ffn_hidden_size": n.ffn if n.ffn is not None else n.expert_ffn,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "qk_layernorm": norm,
        "add_qkv_bias": bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Scaling cosine and sine by f, for queries and keys alike, scales the attention scores by f^2.
        "softmax_scale": n.head_dim**-0.5 * rope.attention_factor**2 if rope.attention_factor != 1.0 else None,
    }


def _chosen(config: ConfigJson, n: Sizes) -> int:
    """Return the number of experts that each token is sent to. Raise ConfigError if the model has fewer."""
    topk = number(config, "num_experts_per_tok")
    if topk > n.experts:
        raise ConfigError(f"model.path: config.json's num_experts_per_tok={topk} is more than its {n.experts} experts")
    return topk


def softmax_fields(config: ConfigJson, n: Sizes, *, normalized: bool) -> dict[str, Any]:
    """Return the TransformerConfig fields of a softmax router.

    Args:
        config: config.json.
        n: the model's sizes.
        normalized: the chosen experts' probabilities are scaled to a sum of 1, which equals a softmax over the chosen experts only.
    """
    return {
        "num_moe_experts": n.experts,
        "moe_ffn_hidden_size": n.expert_ffn,
        "moe_router_topk": _chosen(config, n),
        "moe_router_pre_softmax": not normalized,
        "moe_router_score_function": "softmax",
    }


def gated_shared_expert_fields(n: Sizes) -> dict[str, Any]:
    """Return the TransformerConfig fields of `decoder_blocks.gated_shared_expert`."""
    return {"moe_shared_expert_intermediate_size": n.shared_ffn, "moe_shared_expert_gate": True}


def plain_sigmoid_fields(family: str, config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the TransformerConfig fields of a sigmoid router with a bias and without groups.

    Args:
        family: its name, for the message.
        config: config.json.
        n: the model's sizes.

    Raises:
        ConfigError: each token is sent to one expert only.
    """
    if _chosen(config, n) == 1:  # whose weight the model makes 1, and Megatron leaves as it is (moe_utils.py:868)
        raise ConfigError(f"model.path: num_experts_per_tok=1 is not supported for {family}")
    return {
        "num_moe_experts": n.experts,
        "moe_ffn_hidden_size": n.expert_ffn,
        "moe_router_topk": _chosen(config, n),
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }


def sigmoid_fields(family: str, config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return the TransformerConfig fields of the router and the MLPs of `decoder_blocks.shared_experts`.

    Args:
        family: its name, for the message.
        config: config.json.
        n: the model's sizes.

    Raises:
        ConfigError: Megatron's router would choose different experts than the model's own.
    """
    topk = _chosen(config, n)
    if topk == 1 or not config["norm_topk_prob"]:
        raise ConfigError(f"model.path: norm_topk_prob=false or num_experts_per_tok=1 is not supported for {family}")
    if n.experts // (groups := number(config, "n_group")) < 2:
        raise ConfigError(
            f"model.path: n_group={groups}: a group's score is the sum of its two best experts, and it has {n.experts // groups}"
        )
    return {
        "num_moe_experts": n.experts,
        "moe_ffn_hidden_size": n.expert_ffn,
        "moe_router_topk": topk,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        **shared_fields(config, n),
    }


def shared_fields(config: ConfigJson, n: Sizes, *, grouped: bool = True) -> dict[str, Any]:
    """Return the TransformerConfig fields of dense first layers, shared experts and groups, which routers of any kind may have.

    Args:
        config: config.json.
        n: the model's sizes.
        grouped: experts are chosen within the best of n_group groups, of which `upstream.SortedTopK` has the rule.

    Raises:
        ConfigError: groups and experts do not go together.
    """
    limits = {}
    if grouped:
        topk, groups, chosen = _chosen(config, n), number(config, "n_group"), number(config, "topk_group")
        if n.experts % groups or chosen > groups:
            raise ConfigError(f"model.path: n_group={groups} and topk_group={chosen} do not divide {n.experts} experts")
        if topk > (room := n.experts // groups * chosen):
            raise ConfigError(f"model.path: num_experts_per_tok={topk} is more than the {room} experts of topk_group={chosen} groups")
        limits = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > chosen else {}
    return {
        "moe_layer_freq": [0] * n.dense + [1] * (n.layers - n.dense),
        "moe_shared_expert_intermediate_size": n.shared_ffn,
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        **limits,
    }


def shared_sizes(config: ConfigJson) -> dict[str, int | None]:
    """Return the sizes of dense first layers and shared experts, as arguments of `Sizes`. Raise ConfigError if missing or invalid."""
    dense, layers, inner = config["first_k_dense_replace"], number(config, "num_hidden_layers"), number(config, "moe_intermediate_size")
    if type(dense) is not int or not 0 <= dense < layers:
        raise ConfigError(f"model.path: config.json's first_k_dense_replace={dense!r} is not between 0 and {layers - 1}")
    return {
        "ffn": number(config, "intermediate_size") if dense else None,
        "dense": dense,
        "experts": number(config, "n_routed_experts"),
        "expert_ffn": inner,
        "shared_ffn": inner * number(config, "n_shared_experts"),
    }


def check_mlp_layer_types(config: ConfigJson, n: Sizes, dense: int) -> None:
    """Raise ConfigError if mlp_layer_types, which some of transformers' classes read instead of first_k_dense_replace, contradict it.

    Args:
        config: config.json.
        n: the model's sizes.
        dense: how many layers are dense in transformers where config.json has no mlp_layer_types.
    """
    types = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (n.layers - dense)
    if types != ["dense"] * n.dense + ["sparse"] * (n.layers - n.dense):
        raise ConfigError(
            f"model.path: config.json's mlp_layer_types={types!r:.200} are not first_k_dense_replace={n.dense} times 'dense', then 'sparse'"
        )


def norm_over_all_heads(layer: Any, backend: Any) -> None:
    """Edit a layer's ModuleSpec: queries are normalised over all heads together, and so are keys; see `decoder_blocks.attention`."""
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm, attention.k_layernorm = backend.all_heads_norms
