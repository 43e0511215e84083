"""Where the checkpoint of another program that is based on Megatron-core holds each parameter, by whichever of Megatron's names.

Layers are stacked along the first axis of a tensor, or numbered; experts are stacked along the next, or numbered in one of two ways; a norm
before a linear layer has a name of its own or is fused with that layer; gate and up are one tensor or two (`singleton_local_shards`);
what a gated delta net's projection holds for queries, keys and so on has a name each.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megarl.errors import ConfigError
from megarl.models.checkpoint_names import HEAD, parameter_shape
from megarl.models.sizes import Sizes
from megarl.models.te_names import from_te
from megarl.models.weight_map import OUTPUT, Weight
from megarl.models.weight_ops import Shape

_STACKED_LAYERS = re.compile(r"^decoder\.layers\.(?!\d+\.)")
_EXPERTS = re.compile(r"(?<=\.mlp\.experts\.)experts\.(?:(\d+)\.)?(?=linear_fc[12]\.)")
# Gate or up, and the pieces of a gated delta net or a Mamba mixer.
_PIECE = re.compile(r"((?<=\.linear_fc1\.weight)_[wv]|(?<=\.in_proj\.weight)\.\w+|(?<=\.conv1d\.weight)\.\w+|(?<=\.conv1d\.bias)\.\w+)$")
_Place = tuple[str, tuple[int, ...], tuple[int, ...]]  # a name, an index on the stacked axes, and their lengths
_HALVES = ("_w", "_v")


@dataclass(frozen=True)
class StoredPart:
    """A parameter, or a piece of it, at `[*index, ...]` of the checkpoint's tensor `key`, whose shape is `(*extents, *shape)`."""

    key: str
    index: tuple[int, ...]
    extents: tuple[int, ...]
    shape: Shape


def stored_parts(weights: Iterable[Weight], sizes: Sizes, keys: Collection[str]) -> dict[str, tuple[StoredPart, ...]]:
    """Find where a checkpoint holds the parameters of a model.

    Args:
        weights: the parameters.
        sizes: the model's sizes.
        keys: the names of the tensors in the checkpoint.

    Returns:
        Parameter's name -> its parts, one after the other along its first axis.

    Raises:
        ConfigError: names of parameters that are missing or there twice, or of tensors that belong to none, with their number.
    """
    keys_of: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for key in keys:
        name, piece = _local(key)
        if piece in keys_of[name]:
            raise ConfigError(f"holds {name} twice, as {keys_of[name][piece]} and {key}")
        keys_of[name][piece] = key
    parts_of: dict[str, tuple[StoredPart, ...]] = {}
    missing, used = list[str](), set[str]()
    for weight in weights:
        places = [(name, index, extents) for name, index, extents in _places(weight, sizes) if name in keys_of]
        if not places:
            missing.append(weight.name)
            continue
        if len(places) > 1:
            raise ConfigError(f"holds {weight.name} twice, as {' and '.join(next(iter(keys_of[name].values())) for name, _, _ in places)}")
        [(name, index, extents)] = places
        pieces = _pieces(weight) if "" not in keys_of[name] else {"": parameter_shape(weight.op)}
        if keys_of[name].keys() != pieces.keys():
            expected = f"{weight.name} or its pieces {', '.join(pieces)}"
            raise ConfigError(f"holds {', '.join(sorted(keys_of[name].values()))} of {weight.name}, expected {expected}")
        parts_of[weight.name] = tuple(StoredPart(keys_of[name][piece], index, extents, shape) for piece, shape in pieces.items())
        used.update(keys_of[name].values())
    if missing:
        raise ConfigError(f"lacks {missing[0]} ({len(missing)} of {len(missing) + len(parts_of)} parameters are missing)")
    extra = sorted(key for key in keys if key not in used)
    if extra:
        raise ConfigError(f"holds {extra[0]}, which the model does not have ({len(extra)} such tensors)")
    return parts_of


def _pieces(weight: Weight) -> dict[str, Shape]:
    """Return the shapes of a parameter's pieces, by what they add to its name: in order, they are its rows."""
    if len(weight.op.pieces) > 1:
        return {name: parameter_shape(op) for name, op in weight.op.pieces.items()}
    rows, *rest = parameter_shape(weight.op)
    return {name: (rows // len(_HALVES), *rest) for name in _HALVES}


def _local(key: str) -> tuple[str, str]:
    """Return the local name (`te_names`) of a checkpoint's tensor, with "*" for stacked layers and experts, and which piece it is."""
    piece = _PIECE.search(key)
    name = _STACKED_LAYERS.sub("decoder.layers.*.", _PIECE.sub("", key))
    name = from_te(_EXPERTS.sub(lambda match: f"local_experts.{match[1] or '*'}.", name))
    return OUTPUT if name == HEAD else name, piece[0] if piece is not None else ""


def _places(weight: Weight, sizes: Sizes) -> list[_Place]:
    """Return the names that a parameter may have in `_local`'s form, each with its index on the stacked axes and their lengths."""
    places: list[_Place] = [(weight.name, (), ())]
    for number, count, prefix in ((weight.layer, sizes.layers, "decoder.layers."), (weight.expert, sizes.experts, "local_experts.")):
        if number is not None:
            places += [
                (name.replace(f"{prefix}{number}.", f"{prefix}*.", 1), (*index, number), (*extents, count))
                for name, index, extents in places
            ]
    return places
