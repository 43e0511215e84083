"""The vision tower of Qwen3-VL and Qwen3.5: its sizes in config.json, its tensors, and the multimodal RoPE of the language model after it.

config.json has the tower as `vision_config` and the language model as `text_config`. Megatron has no such tower (its own are LLaVA's and
RADIO's): `parallel/vision.py` computes it, with every tensor whole on the ranks of the first pipeline stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import ConfigError
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder_blocks import logits
from megarl.models.family import Family, Head, no_predictor
from megarl.models.sizes import Sizes
from megarl.models.weight_map import VISION, WeightMapping
from megarl.models.weight_ops import Plain, Shape

TOWER, TEXT = "model.visual.", "model.language_model."  # prefixes of the tensors of tower and language model
DEFAULTS: dict[str, Any] = {  # of transformers' Qwen3VLVisionConfig and Qwen3_5VisionConfig
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
DEEPSTACK, SECTIONS = (8, 16, 24), (24, 20, 20)  # of Qwen3-VL

# Fields of Megatron's TransformerConfig. The fused kernel turns each sequence by its positions from 0 on, and these paths call the parts of
# a layer, not the layer, which adds features of images.
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("apply_rope_fusion", "overlap_moe_expert_parallel_comm", "enable_cuda_graph", "external_cuda_graph"), False),
    "cuda_graph_impl": "none",
}


@dataclass(frozen=True)
class VisionSizes:
    """The sizes of a vision tower, and what the language model needs of it."""

    depth: int
    hidden: int
    ffn: int
    heads: int
    channels: int
    patch: int  # pixels of a patch's side
    frames: int  # of a patch
    merge: int  # patches of the side of a square that becomes one token
    side: int  # positions of the learned grid's side
    out: int  # hidden size of the language model
    deepstack: tuple[int, ...]  # blocks after which features are taken, for the first layers of the language model
    sections: tuple[int, int, int]  # pairs of a head's dimensions that turn by frame, row and column
    image_token: int

    @property
    def pixels(self) -> int:
        """The numbers of a patch."""
        return self.channels * self.frames * self.patch**2


def vision_sizes(config: ConfigJson, n: Sizes, pairs: int, sections: Sequence[int], deepstack: Sequence[int] | None) -> VisionSizes:
    """Return the sizes of the tower of a completed config.json.

    Args:
        config: config.json.
        n: the sizes of its language model.
        pairs: of a head's dimensions that RoPE turns.
        sections: those that turn by frame, row and column, where config.json does not say.
        deepstack: the blocks of which features are taken, where config.json does not say; None: the family takes none.

    Raises:
        ConfigError: a tower that is not Qwen3-VL's, or one that does not fit the language model.
    """
    given = config.get("vision_config")
    if not isinstance(given, Mapping):
        raise ConfigError("model.path: config.json has no vision_config, which describes what sees images")
    tower = {**DEFAULTS, **given}
    side = round(number(tower, "num_position_embeddings") ** 0.5)
    hidden, heads, out, depth = (number(tower, key) for key in ("hidden_size", "num_heads", "out_hidden_size", "depth"))
    turned = (tower.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    taken, axes = tower.get("deepstack_visual_indexes", deepstack or ()), _rope_numbers(config)
    sections = axes.get("mrope_section", sections)
    count = len(taken) if _numbers(taken) else 0
    for wrong, fault in (
        (tower["hidden_act"] != "gelu_pytorch_tanh", f"hidden_act={tower['hidden_act']!r:.80} is not supported"),
        (turned != 10000.0, f"rope_parameters.rope_theta={turned!r:.80} is not 10000"),
        (side**2 != tower["num_position_embeddings"], f"num_position_embeddings={tower['num_position_embeddings']} is no square"),
        (hidden % heads or hidden // heads % 4, f"hidden_size={hidden} does not divide into num_heads={heads} of a multiple of 4"),
        (out != n.hidden, f"out_hidden_size={out} is not text_config's hidden_size={n.hidden}"),
        (not _numbers(taken) or sorted(set(taken)) != [*taken] or any(one >= depth for one in taken), "deepstack_visual_indexes"),
        (deepstack is None and count, f"deepstack_visual_indexes={taken!r:.80} is not supported for {config['architectures'][0]}"),
        (count > n.layers, f"deepstack_visual_indexes are {count}, more than text_config's {n.layers} layers"),
    ):
        if wrong:
            what = fault if fault != "deepstack_visual_indexes" else f"{fault}={taken!r:.80} are not ascending blocks of depth={depth}"
            raise ConfigError(f"model.path: config.json's vision_config: {what}")
    if not _numbers(sections) or len(sections) != 3 or sum(sections) != pairs:
        raise ConfigError(f"model.path: config.json's mrope_section={sections!r:.80} are not three numbers with the sum {pairs}")
    if axes.get("mrope_interleaved") is not True:  # without the key vLLM does not interleave, and transformers does
        raise ConfigError("model.path: config.json's RoPE must have mrope_interleaved=true, as published")
    return VisionSizes(
        depth=depth,
        hidden=hidden,
        ffn=number(tower, "intermediate_size"),
        heads=heads,
        channels=number(tower, "in_channels"),
        patch=number(tower, "patch_size"),
        frames=number(tower, "temporal_patch_size"),
        merge=number(tower, "spatial_merge_size"),
        side=side,
        out=out,
        deepstack=tuple(taken),
        sections=(sections[0], sections[1], sections[2]),
        image_token=_image_token(config, n),
    )


def _numbers(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(type(value) is int and value >= 0 for value in values)


def _rope_numbers(config: ConfigJson) -> Mapping[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _image_token(config: ConfigJson, n: Sizes) -> int:
    token = number(config, "image_token_id")
    if token >= n.vocab:
        raise ConfigError(f"model.path: config.json's image_token_id={token} is not a token of vocab_size={n.vocab}")
    return token


def with_vision(
    n: Sizes,
    config: ConfigJson,
    *,
    pairs: int | None = None,
    sections: Sequence[int] = SECTIONS,
    deepstack: Sequence[int] | None = DEEPSTACK,
) -> Sizes:
    """Return the sizes of a language model with those of its tower. `pairs`: see `vision_sizes`, like the others; None: of whole heads."""
    return replace(n, vision=vision_sizes(config, n, n.head_dim // 2 if pairs is None else pairs, sections, deepstack))


def tower(v: VisionSizes) -> list[WeightMapping]:
    """Return the mappings of the tower: every tensor under its own name, whole."""
    square, wide = v.merge**2, v.hidden * v.merge**2
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (v.hidden, v.channels, v.frames, v.patch, v.patch),
        "patch_embed.proj.bias": (v.hidden,),
        "pos_embed.weight": (v.side**2, v.hidden),
    }
    for block in range(v.depth):
        for name, rows, columns in (
            ("attn.qkv", 3 * v.hidden, v.hidden),
            ("attn.proj", v.hidden, v.hidden),
            ("mlp.linear_fc1", v.ffn, v.hidden),
            ("mlp.linear_fc2", v.hidden, v.ffn),
        ):
            shapes |= {f"blocks.{block}.{name}.weight": (rows, columns), f"blocks.{block}.{name}.bias": (rows,)}
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{block}.{norm}.{kind}": (v.hidden,) for kind in ("weight", "bias")}
    mergers = {"merger.": v.hidden} | {f"deepstack_merger_list.{index}.": v.hidden * square for index in range(len(v.deepstack))}
    for merger, normed in mergers.items():
        shapes |= {f"{merger}norm.{kind}": (normed,) for kind in ("weight", "bias")}
        for name, rows in (("linear_fc1", wide), ("linear_fc2", v.out)):
            shapes |= {f"{merger}{name}.weight": (rows, wide), f"{merger}{name}.bias": (rows,)}
    return [WeightMapping(VISION + name, (TOWER + name,), Plain(shape)) for name, shape in shapes.items()]


def with_tower(text: Family, sizes: Callable[[ConfigJson], Sizes], architecture: str, value: Head, **changes: Any) -> Family:
    """Return the family of models of text and images whose language model is of the family `text`.

    Args:
        text: the family of the language model.
        sizes: as in `Family`, those of the tower among them.
        architecture: config.json's architectures[0] of a model with the language model's head.
        value: the other head.
        **changes: further fields of the family that are not those of `text`.
    """

    def weight_map(config: ConfigJson) -> list[WeightMapping]:
        v = sizes(config).vision
        assert v is not None
        return [*tower(v), *_in_language_model(text.weight_map(config))]

    def fields(config: ConfigJson) -> dict[str, Any]:
        sizes(config)
        return {**text.fields(config), **FIELDS}

    def output(config: ConfigJson) -> WeightMapping:
        one = logits(sizes(config), config)
        return _in_language_model([one])[0] if one.alias else one  # a tied output layer is the embedding by its longer name

    return replace(
        text,
        heads={"lm": Head(architecture, output, {}), "value": value},
        sizes=sizes,
        weight_map=weight_map,
        fields=fields,
        predictor=no_predictor,
        images=None,
        nested=True,
        **changes,
    )


def _in_language_model(mappings: list[WeightMapping]) -> list[WeightMapping]:
    """Return the mappings of a backbone with its tensors named as a part of the whole model."""
    return [replace(one, hf=tuple(TEXT + name.removeprefix("model.") for name in one.hf)) for one in mappings]
