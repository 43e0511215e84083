"""Building blocks of the families' decoders: weight maps of embedding, attention, MLP and experts, and the matching Megatron fields.

A family's file states which of these it uses and under which names, what it refuses, and whatever is specific to the family.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from megarl.config import ConfigError
from megarl.models.config_json import ConfigJson
from megarl.models.family import Head, PredictorNames
from megarl.models.quantized import quantization
from megarl.models.rope import Rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import BLOCK, LAYER, OUTPUT, WeightMapping
from megarl.models.weight_ops import QKV, Fused, GateUp, Op, Plain

EXPERT = LAYER + "mlp.experts.local_experts.{expert}."
# Other spellings of keys by `shared_sizes` and `predictors`, which transformers accepts.
SIGMOID_SPELLINGS = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of attention in config.json's layer_types
_MAX = (1 << 31) - 1  # maximum of any number: Megatron and CUDA count with 32 bits


# --- config.json ---


def number(config: ConfigJson, key: str) -> int:
    """Return a positive integer from config.json. Raise ConfigError if it is missing, not a positive integer or too large."""
    if key not in config:
        raise ConfigError(f"model.path: config.json lacks {key}")
    if type(config[key]) is not int or config[key] < 1:
        raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200} is not a positive integer")
    if config[key] > _MAX:
        raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200} is more than {_MAX}")
    return config[key]


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


def decoder_sizes(config: ConfigJson, **mlp: Any) -> Sizes:
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


# --- weight maps ---


def embedding(n: Sizes) -> WeightMapping:
    """Return the mapping of the vocabulary's embedding, which tensor parallelism may pad."""
    return WeightMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), _vocabulary(n))


def final_norm(n: Sizes) -> WeightMapping:
    """Return the mapping of the norm after the last layer."""
    return WeightMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Plain((n.hidden,)))


def norms(n: Sizes) -> tuple[WeightMapping, WeightMapping]:
    """Return the mappings of the norms before the attention and before the MLP."""
    return (
        WeightMapping(LAYER + "input_layernorm.weight", (BLOCK + "input_layernorm.weight",), Plain((n.hidden,))),
        WeightMapping(LAYER + "pre_mlp_layernorm.weight", (BLOCK + "post_attention_layernorm.weight",), Plain((n.hidden,))),
    )


def attention(
    n: Sizes,
    *,
    bias: bool = False,
    norm: bool | Literal["all_heads"] = False,
    fused: bool = False,
    gated: bool = False,
    layers: Collection[int] | None = None,
) -> list[WeightMapping]:
    """Return the mappings of grouped-query attention, of the norm before it and of that before the MLP.

    Args:
        n: the model's sizes.
        bias: query, key and value have biases.
        norm: each head's query and key are normalised, or those of all heads together.
        fused: query, key and value are one tensor.
        gated: each head's query projection has that of its output's gate beside it.
        layers: layers that have it; None: all. The norms are in all layers.
    """
    before, after = norms(n)
    ours, theirs = LAYER + "self_attention.", BLOCK + "self_attn."
    names = tuple(f"{theirs}{name}_proj." for name in (("qkv",) if fused else "qkv"))
    weights, biases = (tuple(name + kind for name in names) for kind in ("weight", "bias"))
    mappings = [WeightMapping(ours + "linear_qkv.weight", weights, _qkv(n, fused, gated, n.hidden))]
    if bias:
        mappings.append(WeightMapping(ours + "linear_qkv.bias", biases, _qkv(n, fused, gated)))
    if norm == "all_heads":
        widths = {"q": n.heads * n.head_dim, "k": n.groups * n.head_dim}
        mappings += [WeightMapping(f"{ours}{x}_layernorm.weight", (f"{theirs}{x}_norm.weight",), Plain((widths[x],))) for x in "qk"]
    elif norm:
        mappings += [WeightMapping(f"{ours}{x}_layernorm.weight", (f"{theirs}{x}_norm.weight",), Plain((n.head_dim,))) for x in "qk"]
    mappings.append(WeightMapping(ours + "linear_proj.weight", (theirs + "o_proj.weight",), Plain((n.hidden, n.heads * n.head_dim), 1)))
    return [before, *(replace(one, layers=layers) for one in mappings), after]


def gated_mlp(
    n: Sizes, ffn: int, ours: str = "mlp.", theirs: str = "mlp.", layers: range | None = None, *, fused: bool = False
) -> list[WeightMapping]:
    """Return the mappings of a gated MLP that tensor parallelism splits: a dense MLP, or the shared experts.

    Args:
        n: the model's sizes.
        ffn: number of hidden units.
        ours: Megatron's name prefix inside the layer.
        theirs: Hugging Face's name prefix inside the layer.
        layers: layers that have it; None: all.
        fused: gate and up projection are one tensor.
    """
    ours, theirs = LAYER + ours, BLOCK + theirs
    names, op = ("gate_up",) if fused else ("gate", "up"), GateUp(ffn, n.hidden)
    return [
        WeightMapping(
            ours + "linear_fc1.weight",
            tuple(f"{theirs}{name}_proj.weight" for name in names),
            Fused(op) if fused else op,
            layers=layers,
        ),
        WeightMapping(ours + "linear_fc2.weight", (theirs + "down_proj.weight",), Plain((n.hidden, ffn), 1), layers=layers),
    ]


def experts(
    n: Sizes, theirs: str = "mlp.", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"), layers: range | None = None
) -> list[WeightMapping]:
    """Return the mappings of the router and the routed experts.

    Args:
        n: the model's sizes.
        theirs: Hugging Face's name prefix of the mixture inside the layer.
        names: Hugging Face's names of an expert's gate, up and down projections.
        layers: layers that have it; None: all.
    """
    router, expert = BLOCK + theirs + "gate.weight", BLOCK + theirs + "experts.{expert}."
    gate, up, down = (f"{expert}{name}.weight" for name in names)
    return [
        WeightMapping(LAYER + "mlp.router.weight", (router,), Plain((n.experts, n.hidden)), layers=layers),
        WeightMapping(EXPERT + "linear_fc1.weight", (gate, up), GateUp(n.expert_ffn, n.hidden), layers=layers),
        WeightMapping(EXPERT + "linear_fc2.weight", (down,), Plain((n.hidden, n.expert_ffn), 1), layers=layers),
    ]


def expert_bias(n: Sizes, theirs: str, layers: range | None = None) -> WeightMapping:
    """Return the mapping of the bias that a router adds to the scores by which it chooses experts.

    Args:
        n: the model's sizes.
        theirs: Hugging Face's name inside the layer.
        layers: layers that have it; None: all.
    """
    return WeightMapping(LAYER + "mlp.router.expert_bias", (BLOCK + theirs,), Plain((n.experts,)), layers=layers, float32=True)


def gated_shared_expert(n: Sizes, layers: range | None = None) -> list[WeightMapping]:
    """Return the mappings of Qwen's shared expert, whose output the sigmoid of a gate scales; `layers`: layers that have it; None: all."""
    gate = (BLOCK + "mlp.shared_expert_gate.weight",)
    return [
        *gated_mlp(n, n.shared_ffn, "mlp.shared_experts.", "mlp.shared_expert.", layers),
        WeightMapping(LAYER + "mlp.shared_experts.gate_weight", gate, Plain((1, n.hidden)), layers=layers),
    ]


def gated_shared_expert_fields(n: Sizes) -> dict[str, Any]:
    """Return the TransformerConfig fields of `gated_shared_expert`."""
    return {"moe_shared_expert_intermediate_size": n.shared_ffn, "moe_shared_expert_gate": True}


def shared_experts(n: Sizes, *, bias: bool) -> list[WeightMapping]:
    """Return the mappings of DeepSeek's and GLM-4.5's MLPs.

    The first layers are dense; the others have routed experts, chosen by score plus a bias, and shared experts.

    Args:
        n: the model's sizes.
        bias: the router has an expert bias.
    """
    rest = range(n.dense, n.layers)
    return [
        *(gated_mlp(n, n.ffn, layers=range(n.dense)) if n.ffn is not None else []),
        *experts(n, layers=rest),
        *([expert_bias(n, "mlp.gate.e_score_correction_bias", rest)] if bias else []),
        *gated_mlp(n, n.shared_ffn, "mlp.shared_experts.", "mlp.shared_experts.", rest),
    ]


def logits(n: Sizes, config: ConfigJson) -> WeightMapping:
    """Return the mapping of the output layer, which may be tied to the embedding."""
    tied = config["tie_word_embeddings"]
    return WeightMapping(OUTPUT, ("model.embed_tokens.weight" if tied else "lm_head.weight",), _vocabulary(n), alias=tied)


def lm_head(architecture: str, sizes: Any) -> Head:
    """Return the head of a language model."""
    return Head(architecture, lambda config: logits(sizes(config), config), {})


def unused(config: ConfigJson) -> tuple[str, ...]:
    """Return the names of unused tensors that checkpoints may store: a tied output layer, and in some RoPE's frequencies.

    The frequencies are computed from config.json instead.
    """
    stored = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config["num_hidden_layers"]))
    return (*(("lm_head.weight",) if config["tie_word_embeddings"] else ()), *stored)


def predictors(config: ConfigJson) -> tuple[str, ...]:
    """Return the name prefixes of the multi-token prediction layers, which follow the last regular layer."""
    return tuple(f"model.layers.{config['num_hidden_layers'] + index}." for index in range(config["num_nextn_predict_layers"]))


def predictor(config: ConfigJson) -> PredictorNames:
    """Return the names of DeepSeek's and GLM-4.5's multi-token prediction layer. Raise ConfigError if there are several."""
    check_one_predictor(config, "num_nextn_predict_layers")
    [prefix] = predictors(config)
    return PredictorNames(
        layer=prefix,
        embedding_norm=f"{prefix}enorm.weight",
        state_norm=f"{prefix}hnorm.weight",
        projection=f"{prefix}eh_proj.weight",
        norm=f"{prefix}shared_head.norm.weight",
        copies=(f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"),
    )


def check_one_predictor(config: ConfigJson, key: str) -> None:
    """Raise ConfigError unless config.json has one multi-token prediction layer: what a second one reads is not the same everywhere."""
    if config[key] != 1:
        raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200}: model.mtp=train takes 1")


def _vocabulary(n: Sizes) -> Plain:
    return Plain((n.vocab, n.hidden), 0, pads=True)


def _qkv(n: Sizes, fused: bool, gated: bool, *rest: int) -> Op:
    op = QKV(n.heads, n.groups, n.head_dim, rest, gated)
    return Fused(op) if fused else op


# --- Megatron's fields ---


def decoder_fields(config: ConfigJson, n: Sizes, rope: Rope, *, bias: bool = False, norm: bool = False) -> dict[str, Any]:
    """Return the TransformerConfig fields of a dense decoder built from the blocks above.

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
    """Return the TransformerConfig fields of the router and the MLPs of `shared_experts`.

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
    """Return the sizes of the MLPs of `shared_experts`, as arguments of `Sizes`. Raise ConfigError if they are missing or invalid."""
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


# --- Megatron's modules ---


def norm_over_all_heads(layer: Any, backend: Any) -> None:
    """Edit a layer's ModuleSpec: queries are normalised over all heads together, and so are keys; see `attention`."""
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm, attention.k_layernorm = backend.all_heads_norms
