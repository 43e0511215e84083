"""Gated delta nets (linear attention, https://arxiv.org/abs/2412.06464), which some layers have in the place of attention: what their
families share. Beside each key head go the value heads that share it: their values and gates z, decays alpha and learning rates beta.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder_blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder import check_one_predictor
from megarl.models.family import PredictorNames
from megarl.models.sizes import MAMBA, Sizes
from megarl.models.weight_map import BLOCK, LAYER, WeightMapping
from megarl.models.weight_ops import Op, Plain, Sections

CHUNK = 32  # tokens that torch's operations take at once (`parallel/delta_net.py`)
KINDS = ("linear_attention", "full_attention")

DEFAULTS: dict[str, Any] = {  # of transformers' classes
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
}


@dataclass(frozen=True)
class DeltaNets:
    """Sizes of a model's gated delta nets, or of its Mamba mixers, whose keys and queries are what inputs write to and what is read."""

    layers: frozenset[int]  # that have one
    heads: int  # of values
    key_dim: int  # dimensions of a key or query
    keys: int  # dimensions of the keys of all heads together, and of their queries
    values: int  # dimensions of the values of all heads together
    kernel: int  # tokens that its convolution sees
    wide: bool  # engines keep the states of its heads in float32, whatever the model's dtype

    @property
    def channels(self) -> int:
        """The channels of its convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def state_bytes(self, item: int) -> int:
        """Return the bytes that a layer of an engine keeps of a sequence: a matrix for each head, and the last inputs of the convolution.

        Args:
            item: bytes of a number in the model's dtype.
        """
        return self.values * self.key_dim * (4 if self.wide else item) + self.channels * (self.kernel - 1) * item


def delta_nets(fields: Mapping[str, Any], config: ConfigJson, blocks: str = "") -> DeltaNets | None:
    """Return the sizes of a model's gated delta nets or Mamba mixers; None: it has none.

    Args:
        fields: the model's fields of Megatron's TransformerConfig.
        config: config.json.
        blocks: the kinds of its layers (`Sizes.blocks`).
    """
    if MAMBA in blocks:
        return DeltaNets(
            layers=frozenset(layer for layer, kind in enumerate(blocks) if kind == MAMBA),
            heads=fields["mamba_num_heads"],
            key_dim=fields["mamba_state_dim"],
            keys=fields["mamba_num_groups"] * fields["mamba_state_dim"],
            values=fields["mamba_num_heads"] * fields["mamba_head_dim"],
            kernel=config["conv_kernel"],
            wide=config["mamba_ssm_cache_dtype"] == "float32",  # vllm/model_executor/models/config.py
        )
    layers = frozenset(layer for layer, linear in enumerate(fields.get("linear_attention_freq", ())) if linear)
    if not layers:
        return None
    key, heads = fields["linear_key_head_dim"], fields["linear_num_value_heads"]
    return DeltaNets(
        layers=layers,
        heads=heads,
        key_dim=key,
        keys=fields["linear_num_key_heads"] * key,
        values=heads * fields["linear_value_head_dim"],
        kernel=fields["linear_conv_kernel_dim"],
        wide=config.get("mamba_ssm_dtype") == "float32",  # vllm/model_executor/models/config.py:801
    )


def key_heads(config: ConfigJson) -> int:
    """Return the number of key heads. Raise ConfigError if value heads do not share them evenly."""
    keys, values = number(config, "linear_num_key_heads"), number(config, "linear_num_value_heads")
    if values % keys:
        raise ConfigError(f"model.path: config.json's linear_num_key_heads={keys} does not divide linear_num_value_heads={values}")
    return keys


def linear_layers(config: ConfigJson) -> list[bool]:
    """Return, for each layer, whether it is a gated delta net. Raise ConfigError if config.json does not say it of each."""
    count, types = number(config, "num_hidden_layers"), config["layer_types"]
    if types is None:
        interval = number(config, "full_attention_interval")
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if len(types) != count or not set(types) <= set(KINDS):
        raise ConfigError(f"model.path: config.json's layer_types are not {' or '.join(map(repr, KINDS))}, one for each of {count} layers")
    return [kind == KINDS[0] for kind in types]


def layers_of(config: ConfigJson, *, linear: bool) -> tuple[int, ...]:
    """Return the layers that are gated delta nets, or those that are not."""
    return tuple(layer for layer, own in enumerate(linear_layers(config)) if own == linear)


def backbone(config: ConfigJson, n: Sizes, mlps: list[WeightMapping], *, by_head: bool) -> list[WeightMapping]:
    """Return the weight map of a backbone of gated delta nets and gated attention.

    Args:
        config: config.json.
        n: the model's sizes.
        mlps: the mappings of its MLPs and experts.
        by_head: the nets' projections are stored in two tensors, key head after key head; otherwise in four, kind after kind.
    """
    attention = decoder_blocks.attention(n, norm=True, gated=True, layers=layers_of(config, linear=False))
    return decoder_blocks.backbone(n, [*attention, *_nets(config, n, by_head)], mlps)


def _nets(config: ConfigJson, n: Sizes, by_head: bool) -> list[WeightMapping]:
    """Return the mappings of the gated delta nets, which tensor parallelism splits by key head."""
    ours, theirs, groups = LAYER + "self_attention.", BLOCK + "linear_attn.", n.linear_heads
    shared = number(config, "linear_num_value_heads") // groups
    key, value = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
    turned = (("query", key), ("key", key), ("value", shared * value))
    kinds = (*turned, ("z", shared * value), ("beta", shared), ("alpha", shared))
    names, counts = (("qkvz", "ba"), (4, 2)) if by_head else (("qkv", "z", "b", "a"), (3, 1, 1, 1))
    heads = Plain((groups * shared,), 0)
    kernel = Sections(groups, turned, (3,), (1, number(config, "linear_conv_kernel_dim")))
    rows: list[tuple[str, tuple[str, ...], Op]] = [
        ("in_proj.weight", tuple(f"in_proj_{name}.weight" for name in names), Sections(groups, kinds, counts, (n.hidden,), by_head)),
        ("conv1d.weight", ("conv1d.weight",), kernel),
        ("dt_bias", ("dt_bias",), heads),
        ("A_log", ("A_log",), heads),
        ("out_norm.weight", ("norm.weight",), Plain((value,))),
        ("out_proj.weight", ("out_proj.weight",), Plain((n.hidden, groups * shared * value), 1)),
    ]
    layers = layers_of(config, linear=True)
    return [WeightMapping(ours + one, tuple(theirs + name for name in tensors), op, layers=layers) for one, tensors, op in rows]


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig, with those of the gated attention and of the norms of 1 + weight beside them."""
    return {
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(linear) for linear in linear_layers(config)],
        **{key: number(config, key) for key in DEFAULTS if key.startswith("linear_")},
    }


def predictor(config: ConfigJson) -> PredictorNames:
    """Return the names of the multi-token prediction layer. Raise ConfigError if there are several, or another embedding."""
    if (config.get("mtp_num_hidden_layers") or 1) != 1:
        check_one_predictor(config, "mtp_num_hidden_layers")
    if config.get("mtp_use_dedicated_embeddings"):
        raise ConfigError("model.path: config.json's mtp_use_dedicated_embeddings=True: model.mtp=train takes the model's own embedding")
    return PredictorNames(
        layer="mtp.layers.0.",
        embedding_norm="mtp.pre_fc_norm_embedding.weight",
        state_norm="mtp.pre_fc_norm_hidden.weight",
        projection="mtp.fc.weight",
        norm="mtp.norm.weight",
    )


def predictors(config: ConfigJson) -> tuple[str, ...]:
    """Return the name prefix of the multi-token prediction layers."""
    return ("mtp.",)
