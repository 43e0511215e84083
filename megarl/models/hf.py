"""Hugging Face directories: config.json, safetensors and tokenizer files. Nothing here unpickles a file or runs a directory's code.

Headers are read with only struct and json, so that a checkpoint is checked before torch opens any of its files.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megarl.errors import Absent, ConfigError
from megarl.models.config_json import check_kinds
from megarl.models.family import Family
from megarl.models.quantized import FLOAT8, MXFP4, dequantized, from_mxfp4, quantization
from megarl.models.registry import completed, find_family, language_model
from megarl.text.strict_json import parse_json, read_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
CONVERSION = "conversion.json"  # the record that `megarl convert` writes beside the weights
RANGE_FILE = "scores.json"  # the range of a reward model's scores, written by `megarl rm`
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
_JSON_LIMIT = 256 << 20  # bytes; an index takes about 100 per tensor
_ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys((FLOAT8, "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
_SCALES = {"F32", "BF16", "F16", "F8_E8M0"}  # dtypes of the scales of quantised weights
# The name of a stack of experts' tensors: before and after the expert's number. Granite's experts have no module of their own.
_STACK = re.compile(r"(.*\.(?:experts|input_linear|output_linear)\.)([a-z]\w*)")
_PART = re.compile(r"(.*\.(?:experts|input_linear|output_linear)\.)(\d+)\.([a-z][\w.]*)")
_MODEL, _PREDICTOR = "model.", "mtp."  # what the names of a language model's tensors begin with, and those of Qwen's MTP layers
_BLOCKS, _MX_SCALES, _MX_BYTES = "_blocks", "_scales", 16  # what the names of MXFP4's tensors add, and the bytes of a block
_ACTIVATIONS = (".input_scale", ".input_scale_ub", ".activation_scale")  # scales of quantised activations, beside a quantised weight


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, as declared by its file's header."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, ...
    file: Path
    start: int  # byte offset in the file
    scales: Scales | None = None  # of quantised values, without which they mean nothing
    stack: Stack | None = None  # of which it is a part
    name: str | None = None  # in the file, where it is not the one by which megarl knows it

    @property
    def read_dtype(self) -> str:
        """The dtype in which it is read."""
        return self.dtype if self.scales is None and self.dtype != MXFP4 else "BF16"

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * _ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Scales:
    """The tensor of the scales of a quantised matrix."""

    name: str
    info: TensorInfo
    block: tuple[int, int]  # rows and columns that share a scale


@dataclass(frozen=True)
class Stack:
    """The stored tensors whose first axis is a layer's experts, and a place on it: one, or MXFP4's blocks and scales.

    The expert's tensor is named like those of other families, with the expert's number: of `mlp.experts.down_proj` the parts are
    `mlp.experts.0.down_proj`, `mlp.experts.1.down_proj`, ...; or as `Family.stacks` says.
    """

    names: tuple[str, ...]
    infos: tuple[TensorInfo, ...]
    index: int  # counts an expert's parts
    parts: int = 1  # tensors that an expert has in it, one after the other on its rows
    turned: bool = False  # it holds the transposes of the experts' matrices

    def part(self, place: int) -> TensorInfo:
        """Return what the expert has of one of the tensors."""
        info = self.infos[place]
        shape = info.shape[1:]
        if self.parts > 1:
            shape = (shape[0] // self.parts, *shape[1:])
        shape = shape[::-1] if self.turned else shape
        return TensorInfo(shape, info.dtype, info.file, info.start + self.index * math.prod(shape) * _ITEM_SIZES[info.dtype])


def stack_of(family: Family, name: str) -> tuple[str, int, int]:
    """Return the stack that an expert's tensor is a part of in what is written of a family: its name, the tensor's place there (-1: it is
    part of none), and the parts of an expert."""
    match = _PART.fullmatch(name) if family.stacked else None
    if match is None:
        return name, -1, 1
    for stack, leaves in family.stacks.items():
        if match[3] in leaves:
            return f"{match[1]}{stack}", int(match[2]) * len(leaves) + leaves.index(match[3]), len(leaves)
    return f"{match[1]}{match[3]}", int(match[2]), 1


def read_config(path: Path, *, drop_images: bool = False) -> dict[str, Any]:
    """Return the contents of `path`/config.json, with transformers' defaults for missing keys (`registry.completed`).

    `drop_images`: that of the language model. Raises ConfigError if the directory or the file is missing or broken.
    """
    if not path.is_dir():
        raise ConfigError(f"model.path: no such directory: {path}{_of_the_hub(path)}")
    if not (path / CONFIG).is_file():
        raise ConfigError(f"model.path: {path} has no {CONFIG}")
    config = json_object(path / CONFIG)
    check_kinds(language_model(config, drop_images=drop_images), CONFIG)
    if (path / GENERATION).is_file():  # the engine reads it too
        check_kinds(json_object(path / GENERATION), GENERATION)
    return completed(config, drop_images=drop_images)


def end_tokens(path: Path) -> set[int]:
    """Return the tokens that end a response besides the tokenizer's own, as vLLM reads them (vllm/transformers_utils/config.py:1155).

    They come from generation_config.json or, if there is no such file, from config.json.
    """
    ends = json_object(path / (GENERATION if (path / GENERATION).is_file() else CONFIG)).get("eos_token_id")
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _of_the_hub(path: Path) -> str:
    """Return a hint on how to download the model if the path looks like a name on the Hub, from which megarl never downloads."""
    here = Path.cwd()
    parts = path.relative_to(here).parts if path.is_relative_to(here) else path.parts
    if len(parts) == 2 and parts[0] == "models":  # where the suggested command puts its downloads
        return f" (of the Hugging Face Hub? hf download ORGANISATION/{parts[1]} --local-dir models/{parts[1]})"
    if len(parts) != 2 or path.parent.exists() or path.is_absolute() and not path.is_relative_to(here):
        return ""
    return f" (a name of the Hugging Face Hub? hf download {'/'.join(parts)} --local-dir models/{parts[1]})"


def inventory(path: Path, *, predictors: bool = False, drop_images: bool = False) -> dict[str, TensorInfo]:
    """Return every tensor of a checkpoint by name, read from the headers only; quantised ones with their scales.

    Args:
        path: the directory.
        predictors: experts of multi-token prediction layers, too, have a tensor each, where they are stored in stacks.
        drop_images: the tensors of a language model have the names of a model of text (`registry.find_family`).

    Raises ConfigError, one line that names the file: a broken header or index, a tensor that the index misplaces; Absent: no weights.
    """
    if (path / INDEX).is_file():
        return _as_known(path, _with_scales(path, _indexed(path)), predictors, drop_images)
    if (path / SINGLE).is_file():
        return _as_known(path, _with_scales(path, header(path / SINGLE)), predictors, drop_images)
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        raise ConfigError(f"model.path: {path} holds only pickled weights ({pickles[0]}), which are never read: convert to safetensors")
    raise Absent(f"model.path: {path} has neither {SINGLE} nor {INDEX}")


def has_weights(path: Path) -> bool:
    """Whether a directory has files of weights, whatever they hold."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file() and any(path.glob("*.safetensors"))


def _with_scales(path: Path, held: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Attach their scales to the matrices of 8-bit floats, as far as config.json says how; scales that fit no matrix stay as they are."""
    quantised = [name for name, info in held.items() if info.dtype == FLOAT8 and len(info.shape) == 2]
    stored = quantization(json_object(path / CONFIG)) if quantised else None
    if stored is None:
        return held
    scaled, used = dict[str, TensorInfo](), set[str]()
    for name in quantised:
        for other in (name + suffix for suffix in stored.suffixes):
            block = stored.block_of(held[name].shape, held[other].shape) if other in held and held[other].dtype in _SCALES else None
            if block is not None:
                scaled[name] = replace(held[name], scales=Scales(other, held[other], block))
                used.add(other)
                break
    return {name: info for name, info in (held | scaled).items() if name not in used}


def _as_known(path: Path, tensors: dict[str, TensorInfo], predictors: bool, drop_images: bool) -> dict[str, TensorInfo]:
    """Name the tensors as the family does: each expert's by itself, and those of a language model without the rest of a larger model."""
    family = find_family(json_object(path / CONFIG), drop_images=drop_images)
    if family is None:
        return tensors
    if family.images is not None:
        text = family.images.text
        named = ((name, replace(info, name=name) if name.startswith(text) else info) for name, info in tensors.items())
        tensors = {_MODEL + name.removeprefix(text) if info.name else name: info for name, info in named}
    if family.stacks:
        prefixes = (_MODEL, _PREDICTOR) if predictors else (_MODEL,)
        tensors = dict(pair for name, info in tensors.items() for pair in _parts(family.stacks, prefixes, name, info))
    if family.stacks or not family.stacked:
        return tensors
    hidden = language_model(json_object(path / CONFIG)).get("hidden_size")
    return _with_stacks(tensors, {name: (axis, hidden) for name, axis in family.hidden_axes.items()})


def _parts(stacks: Mapping[str, tuple[str, ...]], prefixes: tuple[str, ...], name: str, info: TensorInfo) -> list[tuple[str, TensorInfo]]:
    """Return the experts' tensors of which one of these stacks consists, if its name begins with such; any other tensor as it is."""
    match = _STACK.fullmatch(name) if name.startswith(prefixes) else None
    leaves = stacks.get(match[2]) if match else None
    if match is None or leaves is None or len(info.shape) < 2 or info.shape[1] % len(leaves):
        return [(name, info)]
    parts = []
    for index in range(info.shape[0] * len(leaves)):
        expert, place = divmod(index, len(leaves))
        stack = Stack((info.name or name,), (info,), index, len(leaves))
        parts.append((f"{match[1]}{expert}.{leaves[place]}", replace(stack.part(0), stack=stack)))
    return parts


def _with_stacks(held: dict[str, TensorInfo], axes: Mapping[str, tuple[int, Any]]) -> dict[str, TensorInfo]:
    """Replace the stacks of a family that stores its experts in such by the experts' tensors; MXFP4's blocks and scales by their values.

    Args:
        held: the stored tensors.
        axes: `Family.hidden_axes`, with the length of such an axis.
    """
    tensors = dict[str, TensorInfo]()
    for name, info in held.items():
        packed = name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _MX_SCALES in held
        if name.endswith(_MX_SCALES) and name.removesuffix(_MX_SCALES) + _BLOCKS in held:
            continue
        if not (match := _STACK.fullmatch(name)) or not info.shape:
            tensors[name] = info
            continue
        names = (name, name.removesuffix(_BLOCKS) + _MX_SCALES) if packed else (name,)
        infos = tuple(held[one] for one in names)
        axis, hidden = axes.get(match[2], (0, 0))
        turned = match[2] in axes and len(info.shape) == 3 and info.shape[1 + axis] != hidden == info.shape[2 - axis]
        for index in range(info.shape[0]):
            stack = Stack(names, infos, index, turned=turned)
            leaf = match[2].removesuffix(_BLOCKS) if packed else match[2]
            part, shape = stack.part(0), stack.part(0).shape
            if packed:  # [rows, groups, 16 bytes], stored as the transpose of what it stands for
                rows, groups, size = shape if len(shape) == 3 else (0, 0, 0)
                fits = size == _MX_BYTES and infos[1].shape == (info.shape[0], rows, groups) and {one.dtype for one in infos} == {"U8"}
                part = replace(part, shape=(groups * 2 * _MX_BYTES, rows), dtype=MXFP4 if fits else info.dtype)
            tensors[f"{match[1]}{index}.{leaf}"] = replace(part, stack=stack)
    return tensors


def scales_of_activations(held: Mapping[str, TensorInfo]) -> set[str]:
    """Return the names of scales that only a quantised computation needs, beside quantised weights."""
    names = {name for name in held if name.endswith(_ACTIVATIONS)}
    return {name for name in names if (weight := held.get(f"{name.rpartition('.')[0]}.weight")) is not None and weight.scales is not None}


class Checkpoint:
    """A checkpoint that is read lazily: a context manager that memory-maps each file on first use. Arguments as of `inventory`."""

    def __init__(self, path: Path, *, predictors: bool = False, drop_images: bool = False) -> None:
        self.tensors = inventory(path, predictors=predictors, drop_images=drop_images)
        self._open: dict[Path, Any] = {}

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """Read a tensor, or a slice of it along one dimension.

        Args:
            name: the tensor's name; KeyError if the checkpoint has no such tensor.
            dim: the dimension to slice; None: read the whole tensor.
            start: first index of the slice; like `stop`, used only with `dim`.
            stop: the index after the last.

        Returns:
            A tensor on the CPU, in the checkpoint's dtype; bfloat16 if it is quantised.
        """
        info = self.tensors[name]
        if info.stack is not None:
            return self._part(info, info.stack, dim, slice(start, stop) if dim is not None else slice(None))
        file, name = self._file(info.file), info.name or name
        values = file.get_tensor(name) if dim is None else file.get_slice(name)[(slice(None),) * dim + (slice(start, stop),)]
        if info.scales is None:
            return values
        scales = self._file(info.scales.info.file).get_tensor(info.scales.name)
        return dequantized(values, scales, info.scales.block, (start if dim == 0 else 0, start if dim == 1 else 0))

    def _part(self, info: TensorInfo, stack: Stack, dim: int | None, own: slice) -> Tensor:
        stored = [self._file(one.file).get_slice(name) for name, one in zip(stack.names, stack.infos, strict=True)]
        if info.dtype != MXFP4:
            expert, place = divmod(stack.index, stack.parts)
            if stack.turned:
                rows, columns = (own if dim == 0 else slice(None)), (own if dim == 1 else slice(None))
                return stored[0][expert, columns, rows].t()
            axes = [slice(None)] * len(info.shape)
            axes[dim or 0] = own
            first, size = place * info.shape[0], info.shape[0]
            begin, end, _ = axes[0].indices(size)
            return stored[0][(expert, slice(first + begin, first + end), *axes[1:])]
        rows = own if dim == 1 else slice(None)
        values = from_mxfp4(*(one[stack.index, rows] for one in stored)).t()
        return values[own] if dim == 0 else values

    def _file(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(str(path), framework="pt", device="cpu").__enter__()
        return self._open[path]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()


def _indexed(path: Path) -> dict[str, TensorInfo]:
    placed = json_object(path / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise ConfigError(f"model.path: {path / INDEX} has no weight_map of file names")
    headers: dict[str, dict[str, TensorInfo]] = {}
    files = {file.name for file in path.iterdir() if file.is_file()}
    none = files.isdisjoint(placed.values()) and not any("/" in file for file in placed.values())  # as without a download of the weights
    for file in sorted(set(placed.values())):
        if file not in files:
            raise (Absent if none else ConfigError)(f"model.path: {path / INDEX} names {file!r:.300}, which is not a file in the directory")
        headers[file] = header(path / file)
    for name, file in placed.items():
        if name not in headers[file]:
            raise ConfigError(f"model.path: {path / INDEX} puts {name} into {file}, which lacks it")
    return {name: headers[file][name] for name, file in placed.items()}


def header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file. Raise ConfigError, one line that names the file, if it is broken."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 <= length <= min(size - 8, _HEADER_LIMIT):
            raise ConfigError(f"model.path: {file} is not a safetensors file: {size} bytes, header of {length}")
        raw = stream.read(length)
    try:
        entries = parse_json(raw)
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not a safetensors file: its header is not a JSON object: {error}") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"model.path: {file} is not a safetensors file: its header is not a JSON object")
    return {name: _entry(file, name, entry, 8 + length, size) for name, entry in entries.items() if name != "__metadata__"}


def _entry(file: Path, name: str, entry: Any, data: int, size: int) -> TensorInfo:
    room = size - data
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            sized = all(type(extent) is int and extent >= 0 for extent in shape)
            if sized and 0 <= start <= stop <= room and stop - start == math.prod(shape) * _ITEM_SIZES.get(dtype, -1):
                return TensorInfo(tuple(shape), dtype, file, data + start)
            raise ConfigError(
                f"model.path: {file}: {name} is declared as {dtype} {str(shape):.200} at bytes {start} to {stop} of {room}, which cannot be"
            )
    raise ConfigError(f"model.path: {file}: the header's entry of {name} is broken")


def json_object(file: Path) -> dict[str, Any]:
    try:
        value = read_json(file, _JSON_LIMIT)
    except OSError as error:
        raise ConfigError(f"model.path: {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model.path: {file} is not a JSON object")
    return value
