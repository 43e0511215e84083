"""Hugging Face directories: config.json, safetensors and tokenizer files. Nothing here unpickles a file or runs a directory's code.

Headers are read with only struct and json, so that a checkpoint is checked before torch opens any of its files.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from megarl.checkpoints.files import sync
from megarl.errors import ConfigError
from megarl.models.config_json import check_kinds
from megarl.strict_json import parse_json, read_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
CONVERSION = "conversion.json"  # the record that `megarl convert` writes beside the weights
RANGE_FILE = "scores.json"  # the range of a reward model's scores, written by `megarl rm`
SHARD_BYTES = 4 << 30  # maximum size of a file that `CheckpointWriter` writes, unless a single tensor is larger
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
_JSON_LIMIT = 256 << 20  # bytes; an index takes about 100 per tensor
_COPIED = {".json", ".jinja", ".model", ".txt"}  # tokenizer, chat template, generation defaults
_ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, as declared by its file's header."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' name: F32, BF16, ...
    file: Path
    start: int  # byte offset in the file

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * _ITEM_SIZES[self.dtype]


def read_config(path: Path) -> dict[str, Any]:
    """Return the contents of `path`/config.json. Raise ConfigError if the directory or the file is missing or broken.

    transformers 5 writes Qwen's `num_experts` as `num_local_experts`; the returned mapping always has `num_experts`.
    """
    if not path.is_dir():
        raise ConfigError(f"model.path: no such directory: {path}{_of_the_hub(path)}")
    if not (path / CONFIG).is_file():
        raise ConfigError(f"model.path: {path} has no {CONFIG}")
    config = _json_object(path / CONFIG)
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    check_kinds(config, CONFIG)
    if (path / GENERATION).is_file():  # the engine reads it too
        check_kinds(_json_object(path / GENERATION), GENERATION)
    return config


def end_tokens(path: Path) -> set[int]:
    """Return the tokens that end a response besides the tokenizer's own, as vLLM reads them (vllm/transformers_utils/config.py:1155).

    They come from generation_config.json or, if there is no such file, from config.json.
    """
    ends = _json_object(path / (GENERATION if (path / GENERATION).is_file() else CONFIG)).get("eos_token_id")
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


def described(
    source: Path, dtype: str | None, changes: Mapping[str, Any] = MappingProxyType({}), trained: bool = False
) -> dict[str, bytes]:
    """Return the files that describe a model's weights: config.json, generation defaults, chat template, tokenizer.

    If nothing changes, config.json is the source's, byte for byte.

    Args:
        source: the Hugging Face directory that they come from.
        dtype: torch's name of the weights' dtype ("bfloat16"); None: the dtype in the source's config.json.
        changes: keys of config.json whose values differ from the source's.
        trained: the weights are no longer the source's, so its score range (`RANGE_FILE`) does not apply and is left out.

    Returns:
        File name -> contents.
    """
    given = _json_object(source / CONFIG)
    config = {**given, **changes, **({"dtype": dtype} if dtype is not None else {})}
    if "torch_dtype" in config and dtype is not None:
        config["torch_dtype"] = dtype
    files = {CONFIG: (source / CONFIG).read_bytes() if config == given else (json.dumps(config, indent=2) + "\n").encode()}
    left_out = {CONFIG, INDEX, CONVERSION} | ({RANGE_FILE} if trained else set())
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name not in left_out:
            files[file.name] = file.read_bytes()
    return files


def inventory(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of a checkpoint by name, read from the headers only.

    Raises ConfigError, one line that names the file: no safetensors, a broken header or index, a tensor that the index misplaces.
    """
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / SINGLE).is_file():
        return header(path / SINGLE)
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        raise ConfigError(f"model.path: {path} holds only pickled weights ({pickles[0]}), which are never read: convert to safetensors")
    raise ConfigError(f"model.path: {path} has neither {SINGLE} nor {INDEX}")


class Checkpoint:
    """A checkpoint that is read lazily: a context manager that memory-maps each file on first use."""

    def __init__(self, path: Path) -> None:
        self.tensors = inventory(path)
        self._open: dict[Path, Any] = {}

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        """Read a tensor, or a slice of it along one dimension.

        Args:
            name: the tensor's name; KeyError if the checkpoint has no such tensor.
            dim: the dimension to slice; None: read the whole tensor.
            start: first index of the slice; like `stop`, used only with `dim`.
            stop: the index after the last.

        Returns:
            A tensor on the CPU, in the checkpoint's dtype.
        """
        from safetensors import safe_open

        file = self.tensors[name].file
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt", device="cpu").__enter__()
        if dim is None:
            return self._open[file].get_tensor(name)
        return self._open[file].get_slice(name)[(slice(None),) * dim + (slice(start, stop),)]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()


class ShardWriter:
    """Write tensors into safetensors files of at most 4 GiB in a directory; a tensor larger than that gets a larger file of its own.

    Args:
        folder: the directory of the files.
        prefix: the start of the files' names.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder, self._prefix = folder, prefix
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._names: set[str] = set()
        self.shards: dict[str, list[str]] = {}  # file name -> tensor names, in the order in which they were written
        self.nbytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a copy of the tensor to the next file."""
        assert name not in self._names, f"{name} written twice"
        self._names.add(name)
        if self._pending and self._pending_bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += tensor.nbytes
        self.nbytes += tensor.nbytes

    def close(self) -> None:
        """Write the remaining tensors, and sync all files to disk."""
        self._flush()
        for file in self.shards:
            sync(self._folder / file)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if self._pending:
            file = f"{self._prefix}{len(self.shards)}.safetensors"
            save_file(self._pending, self._folder / file, metadata={"format": "pt"})
            self.shards[file] = list(self._pending)
            self._pending, self._pending_bytes = {}, 0


class CheckpointWriter:
    """Write a Hugging Face directory: shards, index, config (of `source`, with `changes`), tokenizer files of `source`.

    A context manager. Everything is written to a hidden directory beside `path`, which is renamed to `path` after the last fsync, so that
    `path` is always complete. After an exception nothing is left. Other processes may write shards of their own into `folder`, which are
    added with `include`.

    Args:
        path: the directory to write.
        source: a Hugging Face directory.
        dtype: torch's name of the weights' dtype, for config.json; `add` does not cast.
        changes: as in `described`.

    Raises:
        ConfigError: `path` already exists and is not an empty directory.
    """

    def __init__(self, path: Path, source: Path, dtype: str, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} already exists: not overwritten")
        self.path, self.source, self.dtype, self.changes = path, source, dtype, changes
        self.folder = path.parent / f".{path.name}.partial-{secrets.token_hex(4)}"
        self._own = ShardWriter(self.folder)
        self._shards: dict[str, list[str]] = {}  # written by other processes
        self._nbytes = 0  # written by other processes

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a copy of the tensor to the next shard."""
        self._own.add(name, tensor)

    def include(self, shards: Mapping[str, list[str]], nbytes: int) -> None:
        """Add shards that other processes wrote into `folder`: the tensor names of each file, and their total size in bytes."""
        self._shards |= shards
        self._nbytes += nbytes

    def __enter__(self) -> CheckpointWriter:
        self.folder.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._commit()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _commit(self) -> None:
        self._own.close()
        self._name_shards({**self._own.shards, **self._shards})
        for name, data in described(self.source, self.dtype, self.changes, trained=True).items():
            (self.folder / name).write_bytes(data)
        for file in self.folder.glob("*.safetensors"):
            shutil.copymode(self.folder / CONFIG, file)  # safetensors creates files of mode 0600, whatever the umask
        for file in self.folder.iterdir():
            sync(file)
        sync(self.folder)
        os.rename(self.folder, self.path)
        sync(self.path.parent)

    def _name_shards(self, shards: Mapping[str, list[str]]) -> None:
        placed: dict[str, str] = {}
        for number, (written, names) in enumerate(shards.items()):
            file = SINGLE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            os.rename(self.folder / written, self.folder / file)
            twice = placed.keys() & names
            assert not twice, f"{min(twice)} written twice"
            placed |= dict.fromkeys(names, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": self._own.nbytes + self._nbytes}, "weight_map": dict(sorted(placed.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _indexed(path: Path) -> dict[str, TensorInfo]:
    placed = _json_object(path / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise ConfigError(f"model.path: {path / INDEX} has no weight_map of file names")
    headers: dict[str, dict[str, TensorInfo]] = {}
    files = {file.name for file in path.iterdir() if file.is_file()}
    for file in sorted(set(placed.values())):
        if file not in files:
            raise ConfigError(f"model.path: {path / INDEX} names {file!r:.300}, which is not a file in the directory")
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
        found = parse_json(raw)
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not a safetensors file: its header is not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {file} is not a safetensors file: its header is not a JSON object")
    return {name: _entry(file, name, entry, 8 + length, size) for name, entry in found.items() if name != "__metadata__"}


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


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = read_json(file, _JSON_LIMIT)
    except OSError as error:
        raise ConfigError(f"model.path: {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"model.path: {file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model.path: {file} is not a JSON object")
    return value
