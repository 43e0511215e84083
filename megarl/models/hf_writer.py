"""Hugging Face directories that are written: weights, and the files that describe them, taken from the directory that a model came from."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from megarl.checkpoints.files import sync
from megarl.errors import ConfigError
from megarl.models.hf import CONFIG, CONVERSION, INDEX, RANGE_FILE, SINGLE, TOKENIZER, json_object, stack_of
from megarl.models.quantized import QUANTIZATION
from megarl.models.registry import described_as, has_text_family

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.models.description import ModelDescription

_COPIED = {".json", ".jinja", ".model", ".txt"}  # tokenizer, chat template, generation defaults
_TEMPLATES = ("additional_chat_templates", "chat_templates")  # folders of further chat templates, of transformers' and other programs
_CODE = "auto_map"  # the key that names classes in Python files of the directory
# Of tensors that no longer exist: indices of files (there are several programs' names), and how they were quantised (ModelOpt).
_OF_WEIGHTS = ("*.index.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_OF_PICTURES = {"preprocessor_config.json", "processor_config.json"}
_OF_IMAGES = {*_OF_PICTURES, "video_preprocessor_config.json"}
SHARD_BYTES = 4 << 30  # maximum size of a file that `CheckpointWriter` writes, unless a single tensor is larger


def described(
    source: Path,
    dtype: str | None,
    changes: Mapping[str, Any] = MappingProxyType({}),
    trained: bool = False,
    drop_images: bool = False,
    pixels: tuple[int, int] | None = None,
) -> dict[str, bytes]:
    """Return the files that describe a model's weights: config.json, generation defaults, chat templates, tokenizer.

    If nothing changes, config.json is the source's, byte for byte. How the source's weights were quantised is left out: they are read as
    bfloat16. Python files are copied where an `auto_map` names them; an `auto_map` of files that are not there is left out.

    Args:
        source: the Hugging Face directory that they come from.
        dtype: torch's name of the weights' dtype ("bfloat16"); None: that in which the source's are read.
        changes: keys of config.json whose values differ from the source's.
        drop_images: what is written of a model of text and images is its language model, without the files on how images are cut.
        pixels: the least and the most of an image, which the files on how images are cut are to say; None: they are the source's.
        trained: the weights are no longer the source's, so its score range (`RANGE_FILE`) does not apply and is left out.

    Returns:
        File name -> contents; files of chat templates may lie in a folder.
    """
    given = json_object(source / CONFIG)
    dropped = drop_images and has_text_family(given)
    config = described_as(given, drop_images=drop_images)
    inner = {key: value for key, value in changes.items() if key not in config and key in (config.get("text_config") or {})}
    config |= {key: value for key, value in changes.items() if key not in inner}
    if inner:
        config["text_config"] = {**config["text_config"], **inner}
    if config.pop(QUANTIZATION, None) is not None:
        dtype = dtype or "bfloat16"
    if dtype is not None:
        config |= {"dtype": dtype, **({"torch_dtype": dtype} if "torch_dtype" in config else {})}
        for part in {"text_config", "vision_config"} & config.keys():
            config[part] = {**config[part], **{key: dtype for key in ("dtype", "torch_dtype") if key in config[part]}}
    left_out = {CONFIG, CONVERSION} | ({RANGE_FILE} if trained else set()) | (_OF_IMAGES if dropped else set())
    kept = [file for file in sorted(source.iterdir()) if file.suffix in _COPIED and file.name not in left_out]
    kept = [file for file in kept if not any(file.match(pattern) for pattern in _OF_WEIGHTS)]
    kept += [file for folder in _TEMPLATES for file in sorted((source / folder).glob("*.jinja"))]
    files = {str(file.relative_to(source)): file.read_bytes() for file in kept if file.is_file()}
    written = [(CONFIG, given, config)]
    if TOKENIZER in files:
        tokenizer = json_object(source / TOKENIZER)
        written.append((TOKENIZER, tokenizer, tokenizer))
    for name, before, after in written:
        if not _has_code(source, after):
            after = {key: value for key, value in after.items() if key != _CODE}
        files[name] = (source / name).read_bytes() if after == before else (json.dumps(after, indent=2) + "\n").encode()
        if _CODE in after:  # these may import others
            files |= {file.name: file.read_bytes() for file in sorted(source.glob("*.py"))}
    if pixels is not None:
        for name in _OF_PICTURES & files.keys():
            files[name] = _limited(files[name], *pixels)
    return files


def _limited(file: bytes, least: int, most: int) -> bytes:
    """Return a file on how images are cut with these limits, unless it says nothing of that; transformers 5 may do so one level deeper."""
    processor = json.loads(file)
    inner = processor.get("image_processor", processor)
    if "image_processor_type" not in inner and "size" not in inner:
        return file
    inner["size"] = {"shortest_edge": least, "longest_edge": most}
    inner |= {key: value for key, value in (("min_pixels", least), ("max_pixels", most)) if key in inner}
    return (json.dumps(processor, indent=2) + "\n").encode()


def _has_code(source: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the directory has every Python file that a file's `auto_map` names."""
    given = config.get(_CODE)
    named = [one for value in given.values() for one in (value if isinstance(value, list) else [value])] if isinstance(given, dict) else []
    modules = [one.rpartition(".")[0] for one in named if isinstance(one, str)]  # "repository--module.Class" is not of this directory
    return bool(modules) and all((source / f"{module}.py").is_file() for module in modules)


def stacked(stream: Iterable[tuple[str | list[str], Tensor]], model: ModelDescription) -> Iterator[tuple[str | list[str], Tensor]]:
    """Join the experts' tensors of a stream into the stacks that the model's checkpoints hold, if they hold such (`hf.Stack`).

    Args:
        stream: (name, tensor), or (names, tensors along a first axis); those of one stack follow each other, in any order.
        model: the model.
    """
    import torch

    whole, count, experts = None, 0, model.sizes.experts
    for names, tensors in stream:
        if isinstance(names, str) or not model.family.stacked:
            yield names, tensors
            continue
        stack, _, parts = stack_of(model.family, names[0])
        if whole is None:
            whole = torch.empty((experts * parts, *tensors.shape[1:]), dtype=tensors.dtype)
        whole[[stack_of(model.family, name)[1] for name in names]] = tensors.cpu()
        count += len(names)
        if count == experts * parts:
            yield stack, whole.view(experts, -1, *whole.shape[2:]) if parts > 1 else whole
            whole, count = None, 0
    assert whole is None, f"{count} experts' tensors of a stack have come"


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, by name, each in its own folder there."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


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
        changes: as in `described`, like `drop_images`.

    Raises:
        ConfigError: `path` already exists and is not an empty directory.
    """

    def __init__(
        self,
        path: Path,
        source: Path,
        dtype: str,
        changes: Mapping[str, Any] = MappingProxyType({}),
        drop_images: bool = False,
        pixels: tuple[int, int] | None = None,
    ) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} already exists: not overwritten")
        self.path, self.source, self.dtype, self.changes = path, source, dtype, changes
        self._drop_images, self._pixels = drop_images, pixels
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
        files = described(self.source, self.dtype, self.changes, trained=True, drop_images=self._drop_images, pixels=self._pixels)
        write_files(self.folder, files)
        for file in self.folder.glob("*.safetensors"):
            shutil.copymode(self.folder / CONFIG, file)  # safetensors creates files of mode 0600, whatever the umask
        for folder, _, names in os.walk(self.folder):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))
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
