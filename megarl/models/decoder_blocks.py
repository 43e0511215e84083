"""Building blocks of the families' weight maps: embedding, attention, MLP, experts and output layer of a decoder.

A family's file states which of these it uses and under which names, and whatever is specific to the family. `decoder` has the matching
fields of Megatron's.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

from megarl.models.config_json import ConfigJson
from megarl.models.decoder import check_one_predictor
from megarl.models.family import Head, HeadKind, PredictorNames, scalar_head
from megarl.models.sizes import Sizes
from megarl.models.weight_map import BLOCK, LAYER, OUTPUT, WeightMapping
from megarl.models.weight_ops import QKV, Fused, GateUp, Op, Plain

EXPERT = LAYER + "mlp.experts.local_experts.{expert}."


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


def backbone(n: Sizes, attention: list[WeightMapping], mlps: list[WeightMapping]) -> list[WeightMapping]:
    """Return the weight map of a backbone: Megatron parameter <- Hugging Face tensors.

    Args:
        n: the model's sizes.
        attention: the mappings of its attention.
        mlps: those of its MLPs and experts.
    """
    return [embedding(n), *attention, *mlps, final_norm(n)]


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


def dense_mlps(n: Sizes, *, fused: bool = False) -> list[WeightMapping]:
    """Return the mappings of the gated MLPs of layers without experts, if there are any; `fused`: as of `gated_mlp`."""
    return [] if n.ffn is None else gated_mlp(n, n.ffn, layers=range(n.dense) if n.experts else None, fused=fused)


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


def shared_experts(n: Sizes, *, bias: bool) -> list[WeightMapping]:
    """Return the mappings of DeepSeek's and GLM-4.5's MLPs.

    The first layers are dense; the others have routed experts, chosen by score plus a bias, and shared experts.

    Args:
        n: the model's sizes.
        bias: the router has an expert bias.
    """
    rest = range(n.dense, n.layers)
    return [
        *dense_mlps(n),
        *experts(n, layers=rest),
        *([expert_bias(n, "mlp.gate.e_score_correction_bias", rest)] if bias else []),
        *gated_mlp(n, n.shared_ffn, "mlp.shared_experts.", "mlp.shared_experts.", rest),
    ]


def logits(n: Sizes, config: ConfigJson) -> WeightMapping:
    """Return the mapping of the output layer, which may be tied to the embedding."""
    tied = config["tie_word_embeddings"]
    return WeightMapping(OUTPUT, ("model.embed_tokens.weight" if tied else "lm_head.weight",), _vocabulary(n), alias=tied)


def lm_head(architecture: str, sizes: Callable[[ConfigJson], Sizes]) -> Head:
    """Return the head of a language model."""
    return Head(architecture, lambda config: logits(sizes(config), config), {})


def heads(name: str, sizes: Callable[[ConfigJson], Sizes], *, known: bool = True) -> dict[HeadKind, Head]:
    """Return the heads of a language model, whose classes are `name`ForCausalLM and `name`ForSequenceClassification.

    Args:
        name: what both begin with.
        sizes: as in `Family`.
        known: whether transformers has the second.
    """
    value = scalar_head(f"{name}ForSequenceClassification", sizes, known=known)
    return {"lm": lm_head(f"{name}ForCausalLM", sizes), "value": value}


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


def _vocabulary(n: Sizes) -> Plain:
    return Plain((n.vocab, n.hidden), 0, pads=True)


def _qkv(n: Sizes, fused: bool, gated: bool, *rest: int) -> Op:
    op = QKV(n.heads, n.groups, n.head_dim, rest, gated)
    return Fused(op) if fused else op
