"""Families of decoders whose layers are grouped-query attention, then an MLP or a mixture of experts."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson
from megarl.models.family import Family
from megarl.models.rope import Rope
from megarl.models.rope import rope as plain_rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import WeightMapping


def no_fields(config: ConfigJson, n: Sizes) -> dict[str, Any]:
    """Return no field."""
    return {}


def decoder_family(
    classes: str,
    sizes: Callable[[ConfigJson], Sizes],
    defaults: Mapping[str, Any],
    *,
    mlps: Callable[[Sizes], list[WeightMapping]] = blocks.dense_mlps,
    fields: Callable[[ConfigJson, Sizes], dict[str, Any]] = no_fields,
    rope: Callable[[ConfigJson], Rope] = plain_rope,
    bias: bool = False,
    norm: bool | Literal["all_heads"] = False,
    fused: bool = False,
    known: bool = True,
    **others: Any,
) -> Family:
    """Return a family whose weight map and fields follow from its attention and from its MLPs.

    Args:
        classes: as `name` of `decoder_blocks.heads`.
        sizes: as in `Family`.
        defaults: as in `Family`.
        mlps: the mappings of MLPs and experts, and of whatever else layers have.
        fields: the fields of Megatron's TransformerConfig beside those of a dense decoder; raises ConfigError as `rope` does.
        rope: as in `Family`.
        bias: as of `decoder_blocks.attention`, as are `norm` and `fused`.
        norm: see `bias`.
        fused: see `bias`.
        known: as of `decoder_blocks.heads`.
        **others: further fields of the family.
    """

    def weight_map(config: ConfigJson) -> list[WeightMapping]:
        n = sizes(config)
        return blocks.backbone(n, blocks.attention(n, bias=bias, norm=norm, fused=fused), mlps(n))

    def all_fields(config: ConfigJson) -> dict[str, Any]:
        n = sizes(config)
        return {**decoder.fields(config, n, rope(config), bias=bias, norm=bool(norm)), **fields(config, n)}

    if norm == "all_heads":
        others["layer_spec"] = decoder.norm_over_all_heads
    return Family(
        heads=blocks.heads(classes, sizes, known=known),
        sizes=sizes,
        weight_map=weight_map,
        fields=all_fields,
        rope=rope,
        defaults=defaults,
        **others,
    )
