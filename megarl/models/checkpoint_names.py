"""The name of each parameter in a Megatron checkpoint, and its index on the axes along which layers and experts are stacked there.

The names are those of Megatron models built from Transformer Engine's layers (`te_names`), whichever layers a given model is built from.
Checkpoints are thus the same on every machine, and any program based on Megatron-core finds the names it expects.
"""

import math
import re
from dataclasses import dataclass

from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.models.te_names import to_te
from megarl.models.weight_map import OUTPUT, Weight
from megarl.models.weight_ops import Op, Shape

HEAD = "score.weight"  # a scalar head's name in checkpoints, which differs from its name in the model
_LAYER = re.compile(r"(?<=^decoder\.layers\.)(\d+)\.")
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)local_experts\.(\d+)\.")


@dataclass(frozen=True)
class CheckpointName:
    """Where a piece of a parameter is stored: at `[*index, ...]` of the checkpoint's tensor `key`, whose shape is `(*extents, *shape)`."""

    key: str
    index: tuple[int, ...]  # layer and expert, if the checkpoint stacks them
    extents: tuple[int, ...]  # lengths of the stacked axes
    op: Op  # how tensor parallelism splits the piece

    @property
    def shape(self) -> Shape:
        """The piece's shape, without padding."""
        return parameter_shape(self.op)


@dataclass(frozen=True)
class Box:
    """A rectangular part of a parameter."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def checkpoint_names(model: ModelDescription, head: HeadKind) -> list[tuple[Weight, tuple[CheckpointName, ...]]]:
    """Return every parameter of a model that a checkpoint holds, with the names of its pieces there.

    Args:
        model: the model.
        head: the head on its backbone, whichever head config.json names.

    Returns:
        (parameter, names of its pieces) in the model's order, without tied copies.

    Raises:
        ConfigError: the family does not support this config.json.
    """
    weights = [weight for weight in model.weights(head) if not weight.alias]
    # If layers differ (these fields are lists), Megatron stores each under its number (transformer_block.py:734).
    alike = not any(isinstance(model.fields.get(field), list) for field in ("moe_layer_freq", "linear_attention_freq"))
    renamed = to_te([weight.name for weight in weights])
    names_of_weights = []
    for weight in weights:
        key = HEAD if head == "value" and weight.name == OUTPUT else _EXPERT.sub("experts.", renamed[weight.name])
        index, extents = list[int](), list[int]()
        if weight.layer is not None and alike:
            key = _LAYER.sub("", key)
            index, extents = [weight.layer], [model.sizes.layers]
        if weight.expert is not None:
            index, extents = [*index, weight.expert], [*extents, model.sizes.experts]
        pieces = weight.op.pieces.items()
        names_of_weights.append((weight, tuple(CheckpointName(key + name, tuple(index), tuple(extents), op) for name, op in pieces)))
    return names_of_weights


def parameter_shape(op: Op) -> Shape:
    """Return the parameter's shape: the packed tensor's shape with its leading axes merged into one."""
    packed = op.packed_shape
    own = min(len(op.shapes[0]), len(packed)) - 1  # trailing axes that are not merged
    return (math.prod(packed[: len(packed) - own]), *packed[len(packed) - own :])


def boxes(op: Op, ranks: int) -> list[Box]:
    """Split the parameter among `ranks` tensor-parallel ranks into boxes that each lie within one rank's shard (one box if replicated)."""
    shape, packed, axis = parameter_shape(op), op.packed_shape, op.axis
    if axis is None or ranks == 1:
        return [Box((0,) * len(shape), shape)]
    units, own = op.units(ranks), len(shape) - 1
    cuts = [(min(rank * units, packed[axis]), min((rank + 1) * units, packed[axis])) for rank in range(ranks)]  # without padding
    if axis >= len(packed) - own:  # the axis is not merged: split columns
        return [_box(shape, axis - (len(packed) - len(shape)), start, stop) for start, stop in cuts if start < stop]
    outer, inner = math.prod(packed[:axis]), math.prod(packed[axis + 1 : len(packed) - own])
    rows = [(part * packed[axis] + start, part * packed[axis] + stop) for start, stop in cuts if start < stop for part in range(outer)]
    return [_box(shape, 0, start * inner, stop * inner) for start, stop in rows]


def _box(shape: Shape, axis: int, start: int, stop: int) -> Box:
    offset, size = [0] * len(shape), list(shape)
    offset[axis], size[axis] = start, stop - start
    return Box(tuple(offset), tuple(size))
