"""The plan of a conversion, made before any weight is read: every parameter with its tensors on both sides, divided into units of work."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.errors import ConfigError
from megarl.models.checkpoint_names import CheckpointName, boxes, checkpoint_names
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.models.hf import CONFIG
from megarl.models.quantized import FLOAT8
from megarl.models.weight_map import Weight
from megarl.models.weight_ops import Shape
from megarl.parallel.checkpoint.index import Shard, check_cover

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' name -> torch's dtype
STORED = {**DTYPES, FLOAT8: torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}  # with those of quantised weights and their scales
NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # torch's name -> safetensors' name
_UNITS, _MIN, _MAX = 64, 64 << 20, 2 << 30  # approximate number of units, and the bounds on a unit's size limit in bytes


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter of the model, with its names and its dtypes on both sides."""

    weight: Weight
    names: tuple[CheckpointName, ...]  # of its pieces
    source: str  # dtype on the side that is read, by safetensors' name
    target: str  # dtype on the side that is written

    @property
    def parameters(self) -> int:
        return sum(math.prod(name.shape) for name in self.names)

    @property
    def size(self) -> int:
        """The size in bytes on the side where it is larger."""
        return self.parameters * max(DTYPES[self.source].itemsize, DTYPES[self.target].itemsize)

    @property
    def memory(self) -> int:
        """The maximum number of bytes that its conversion holds: the tensors read, and the result."""
        return 2 * self.size


@dataclass(frozen=True)
class Unit:
    """Consecutive parameters that are converted one after the other, and recorded as finished together."""

    index: int
    items: Sequence[PlannedParameter]

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


@dataclass(frozen=True)
class Layer:
    """The parameters of one layer, or a single parameter outside the layers (such as the embedding), as a measure of memory."""

    name: str
    size: int  # bytes


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Return safetensors' name of the dtype of `what`. Raise ConfigError if weights of this dtype are not converted."""
    name = next((name for name, known in DTYPES.items() if known == dtype), None)
    if name is None:
        raise ConfigError(f"convert: {what} is stored as {dtype}, expected one of {', '.join(NAMES)}")
    return name


def make_items(
    model: ModelDescription, head: HeadKind, dtype_of: Callable[[Weight, tuple[CheckpointName, ...]], str], cast: str | None
) -> list[PlannedParameter]:
    """Return every parameter of a model, with the tensors that are read and written for it.

    Args:
        model: the model.
        head: the head on its backbone.
        dtype_of: returns the dtype (safetensors' name) of a parameter in the source.
        cast: the dtype to write, except for buffers that are always float32; None: the source's.
    """
    items = []
    for weight, names in checkpoint_names(model, head):
        source = dtype_of(weight, names)
        items.append(PlannedParameter(weight, names, source, source if cast is None or weight.float32 else cast))
    _check_names(items)
    return items


def planned(
    path: Path, head: HeadKind | None, dtype: str | None, tp: int, etp: int, *, drop_images: bool = False
) -> tuple[list[PlannedParameter], int]:
    """Plan the conversion of a directory that may hold only config.json: check every name, shape and split without reading any weights.

    Args:
        path: the directory. Its weights are assumed to have the dtype in config.json, or bfloat16 if there is none.
        head: the head on the backbone; None: the one that config.json names.
        dtype: the dtype to cast to, by torch's name; None: no cast.
        tp: tensor-parallel size for which the checkpoint is split.
        etp: the same for experts.
        drop_images: as of `check_checkpoint`.

    Returns:
        The parameters, and the number of units.
    """
    model = ModelDescription.read(path, drop_images=drop_images)
    named = str(model.config.get("dtype") or model.config.get("torch_dtype") or "bfloat16")
    if named not in NAMES:
        raise ConfigError(f"convert: {path / CONFIG}: weights of dtype {named!r} are not converted")
    items = make_items(
        model,
        head or model.head,
        lambda weight, names: "F32" if weight.float32 else NAMES[named],
        NAMES[dtype] if dtype else None,
    )
    check_cut(items, tp, etp)
    check_cover(shard for item in items for shard in shards(item, tp, etp))
    missing = model.expected().keys() - {name for item in items for name in item.weight.hf}
    assert head is not None or not missing, f"nobody takes {sorted(missing)}"
    return items, len(cut_units(items))


def shards(item: PlannedParameter, tp: int, etp: int) -> list[Shard]:
    """Return the pieces of a parameter that a checkpoint holds.

    Args:
        item: the parameter.
        tp: tensor-parallel size for which the checkpoint is split.
        etp: the same for experts.

    Returns:
        Rectangular parts of the checkpoint's tensors, in the dtype to write, which together cover the parameter without its padding.
    """
    return [shard for name in item.names for shard in shards_of(name, item, ranks_of(item.weight, tp, etp))]


def shards_of(name: CheckpointName, item: PlannedParameter, ranks: int) -> list[Shard]:
    """Return those of one piece of the parameter, which `ranks` ranks share; see `shards`."""
    ones = (1,) * len(name.index)
    return [
        Shard(name.key, name.extents + name.shape, name.index + box.offset, ones + box.size, DTYPES[item.target])
        for box in boxes(name.op, ranks)
    ]


def place(item: PlannedParameter) -> str:
    """Return where a parameter is in a checkpoint, for a report: its key, or those of its pieces, and its indices there."""
    keys = ", ".join(name.key for name in item.names)
    return "".join([keys, *(f"[{index}]" for index in item.names[0].index)])


def _check_names(items: Sequence[PlannedParameter]) -> None:
    """Assert that no tensor on either side is used twice, which is an invariant of the families' weight maps."""
    ours = [(name.key, name.index) for item in items for name in item.names]
    theirs = [name for item in items for name in item.weight.hf]
    assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs), "a family's weight map names a tensor twice"
    shapes: dict[str, set[tuple[Shape, Shape]]] = defaultdict(set)
    count: dict[str, int] = defaultdict(int)
    for name in (name for item in items for name in item.names):
        shapes[name.key].add((name.extents, name.shape))
        count[name.key] += 1
    for key, places in shapes.items():
        [(extents, _)] = places  # all layers and experts have the same shape
        assert count[key] == math.prod(extents), f"{key}: {count[key]} parameters for axes of {extents}"


def check_cut(items: Sequence[PlannedParameter], tp: int, etp: int) -> None:
    """Check that a model can be split for tensor parallelism of this size.

    Args:
        items: the model's parameters.
        tp: tensor-parallel size of the dense layers.
        etp: tensor-parallel size of the experts.

    Raises:
        ConfigError: it cannot; the message has the option, the parameter and both numbers.
    """
    for item in items:
        op, ranks = item.weight.op, ranks_of(item.weight, tp, etp)
        if op.axis is not None and not op.pads and op.packed_shape[op.axis] % ranks:
            key = "--etp" if item.weight.expert is not None else "--tp"
            raise ConfigError(f"{key} {ranks}: {item.weight.name} has {op.packed_shape[op.axis]} units to cut, not divisible by {ranks}")


def ranks_of(weight: Weight, tp: int, etp: int) -> int:
    """Return how many tensor-parallel ranks share a parameter.

    Args:
        weight: the parameter.
        tp: tensor-parallel size of the dense layers.
        etp: tensor-parallel size of the experts.
    """
    return etp if weight.expert is not None else tp


def largest_layer(items: Sequence[PlannedParameter]) -> Layer:
    """Return the largest layer, which determines how much memory a conversion takes."""
    sizes: dict[str, int] = defaultdict(int)
    for item in items:
        sizes[item.weight.name if item.weight.layer is None else f"layer {item.weight.layer}"] += item.size
    name = max(sizes, key=lambda name: sizes[name])
    return Layer(name, sizes[name])


def cut_units(items: Sequence[PlannedParameter], shards: Sequence[int] = ()) -> list[Unit]:
    """Divide the items, in order, into units that do not cross the borders of files.

    A unit has at most 1/64 of all bytes, but this limit is at least 64 MiB and at most 2 GiB; a single larger item makes a larger unit.
    `shards`: the indices of the items with which a file begins.
    """
    limit = min(max(sum(item.size for item in items) // _UNITS, _MIN), _MAX)
    units: list[Unit] = []
    unit_items, size = list[PlannedParameter](), 0
    borders = set(shards)
    for index, item in enumerate(items):
        if unit_items and (index in borders or size + item.size > limit):
            units.append(Unit(len(units), tuple(unit_items)))
            unit_items, size = [], 0
        unit_items.append(item)
        size += item.size
    return [*units, Unit(len(units), tuple(unit_items))]


def cut_shards(items: Sequence[PlannedParameter], limit: int, *, stacked: bool) -> list[int]:
    """Divide the items into files of at most `limit` bytes; return the index of each file's first item.

    A single item may be larger, and so may, if they are `stacked`, the experts' items that are parts of one tensor (`hf.Stack`).
    """
    starts, nbytes = [0], 0
    for index, item in enumerate(items):
        size = item.parameters * DTYPES[item.target].itemsize
        if nbytes and nbytes + size > limit and not (stacked and item.weight.expert):  # a stack begins with expert 0
            starts.append(index)
            nbytes = 0
        nbytes += size
    return starts
