"""What a conversion does, before a byte is read: every parameter with its tensors on both sides, cut into units of work."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.errors import ConfigError
from megarl.models.checkpoint_names import CheckpointName, boxes, checkpoint_names
from megarl.models.families import family_of
from megarl.models.hf import CONFIG, read_config
from megarl.models.weight_map import HeadKind, Shape, Weight
from megarl.parallel.checkpoint.dcp import Shard, check_cover

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by safetensors' names
NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of torch -> of safetensors
_UNITS, _LEAST, _MOST = 64, 64 << 20, 2 << 30  # about so many units, and the bytes of one


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter of the model."""

    weight: Weight
    name: CheckpointName
    source: str  # safetensors' name of its dtype on the side that is read
    target: str  # on the side that is written

    @property
    def parameters(self) -> int:
        return math.prod(self.name.shape)

    @property
    def size(self) -> int:
        """Bytes on the side that is larger."""
        return self.parameters * max(DTYPES[self.source].itemsize, DTYPES[self.target].itemsize)

    @property
    def memory(self) -> int:
        """The bytes that its conversion holds at most: what is read beside what is made of it."""
        return 2 * self.size


@dataclass(frozen=True)
class Unit:
    """Consecutive parameters that are converted one after the other and are done together."""

    index: int
    items: Sequence[PlannedParameter]

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


@dataclass(frozen=True)
class Layer:
    """What belongs together in memory: the parameters of one layer, or one outside the layers (an embedding)."""

    name: str
    size: int  # bytes


def make_items(
    hf: Mapping[str, Any], head: HeadKind, dtype_of: Callable[[Weight, CheckpointName], str], cast: str | None
) -> list[PlannedParameter]:
    """Every parameter of a model, with what is read and written for it.

    Args:
        hf: config.json of the model.
        head: what stands on its backbone.
        dtype_of: the dtype (safetensors' name) of a parameter in the source.
        cast: the dtype to write, but for what is float32 in any model; None: the source's.
    """
    config = dict(hf)
    items = []
    for weight, name in checkpoint_names(family_of(config), config, head):
        source = dtype_of(weight, name)
        items.append(PlannedParameter(weight, name, source, source if cast is None or weight.float32 else cast))
    _check_names(items)
    return items


def planned(path: Path, head: HeadKind | None, dtype: str | None, tp: int, etp: int) -> tuple[list[PlannedParameter], int]:
    """Plans the conversion of a directory that may hold config.json alone: checks every name, shape and cut, and reads no weight.

    Args:
        path: the directory. Its weights are taken to have config.json's dtype, bfloat16 where it names none.
        head: what stands on the backbone; None: what config.json names.
        dtype: to cast to, torch's name; None: no cast.
        tp: tensor-parallel ranks that the checkpoint is cut for.
        etp: the same for experts.

    Returns:
        The items, and the number of units.
    """
    config = read_config(path)
    family = family_of(config)
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if named not in NAMES:
        raise ConfigError(f"convert: {path / CONFIG}: weights of dtype {named!r} are not converted")
    items = make_items(
        config,
        head or family.head_of(config),
        lambda weight, name: "F32" if weight.float32 else NAMES[named],
        NAMES[dtype] if dtype else None,
    )
    check_cut(items, tp, etp)
    check_cover(shard for item in items for shard in shards(item, tp, etp))
    missing = family.expected(config).keys() - {name for item in items for name in item.weight.hf}
    assert head is not None or not missing, f"nobody takes {sorted(missing)}"
    return items, len(cut_units(items))


def shards(item: PlannedParameter, tp: int, etp: int) -> list[Shard]:
    """The pieces of a parameter that a checkpoint holds.

    Args:
        item: the parameter.
        tp: tensor-parallel ranks that the checkpoint is cut for.
        etp: the same for experts.

    Returns:
        Rectangles of the checkpoint's tensor, in the dtype to write, which together cover the parameter without its padding.
    """
    name = item.name
    ones = (1,) * len(name.index)
    return [
        Shard(name.key, name.extents + name.shape, name.index + box.offset, ones + box.size, DTYPES[item.target])
        for box in boxes(item.weight.op, ranks_of(item.weight, tp, etp))
    ]


def _check_names(items: Sequence[PlannedParameter]) -> None:
    """No tensor of either side is used or written twice: an invariant of the families' weight maps."""
    ours = [(item.name.key, item.name.index) for item in items]
    theirs = [name for item in items for name in item.weight.hf]
    assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs), "a family's weight map names a tensor twice"
    shapes: dict[str, set[tuple[Shape, Shape]]] = defaultdict(set)
    count: dict[str, int] = defaultdict(int)
    for item in items:
        shapes[item.name.key].add((item.name.extents, item.name.shape))
        count[item.name.key] += 1
    for key, found in shapes.items():
        [(extents, _)] = found  # one shape of all layers and experts
        assert count[key] == math.prod(extents), f"{key}: {count[key]} parameters for axes of {extents}"


def check_cut(items: Sequence[PlannedParameter], tp: int, etp: int) -> None:
    """Checks that tensor parallelism of this size divides a model.

    Args:
        items: its parameters.
        tp: tensor-parallel ranks of the dense layers.
        etp: those of an expert.

    Raises:
        ConfigError: with the option, the parameter and both numbers, where it does not.
    """
    for item in items:
        op, ranks = item.weight.op, ranks_of(item.weight, tp, etp)
        if op.axis is not None and not op.pads and op.packed_shape[op.axis] % ranks:
            key = "--etp" if item.weight.expert is not None else "--tp"
            raise ConfigError(f"{key} {ranks}: {item.weight.name} has {op.packed_shape[op.axis]} units to cut, not divisible by {ranks}")


def ranks_of(weight: Weight, tp: int, etp: int) -> int:
    """How many ranks share a parameter.

    Args:
        weight: the parameter.
        tp: tensor-parallel size.
        etp: the experts'.
    """
    return etp if weight.expert is not None else tp


def largest_layer(items: Sequence[PlannedParameter]) -> Layer:
    """What decides how much memory a conversion takes."""
    sizes: dict[str, int] = defaultdict(int)
    for item in items:
        sizes[item.weight.name if item.weight.layer is None else f"layer {item.weight.layer}"] += item.size
    name = max(sizes, key=lambda name: sizes[name])
    return Layer(name, sizes[name])


def cut_units(items: Sequence[PlannedParameter], shards: Sequence[int] = ()) -> list[Unit]:
    """The items in order, in units of a few hundred megabytes; none crosses a border of `shards` (indices of items that begin one)."""
    limit = min(max(sum(item.size for item in items) // _UNITS, _LEAST), _MOST)
    units: list[Unit] = []
    held, size = list[PlannedParameter](), 0
    borders = set(shards)
    for index, item in enumerate(items):
        if held and (index in borders or size + item.size > limit):
            units.append(Unit(len(units), tuple(held)))
            held, size = [], 0
        held.append(item)
        size += item.size
    return [*units, Unit(len(units), tuple(held))]


def cut_shards(items: Sequence[PlannedParameter], limit: int) -> list[int]:
    """The indices of the items with which a file of at most `limit` bytes begins (one larger item makes a larger file)."""
    starts, held = [0], 0
    for index, item in enumerate(items):
        size = item.parameters * DTYPES[item.target].itemsize
        if held and held + size > limit:
            starts.append(index)
            held = 0
        held += size
    return starts
