"""Convert a model in a step directory, whichever layout saved it, into a Hugging Face directory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoints.steps import CHECKPOINTS, HF, SavedStep, damaged, is_step, listing, verify
from megarl.convert.audit import digest_of, hash_of, totals
from megarl.convert.conversion_directory import ConversionDirectory, UnitRecord
from megarl.convert.engine import Control, Conversion
from megarl.convert.plan import DTYPES, NAMES, PlannedParameter, Unit, cut_shards, cut_units, make_items
from megarl.errors import ConfigError
from megarl.models.arithmetic import differences
from megarl.models.checkpoint_names import HEAD, CheckpointName
from megarl.models.description import ModelDescription
from megarl.models.hf import CONFIG, CONVERSION, INDEX, SINGLE, TensorInfo, stack_of
from megarl.models.hf_writer import described, write_files
from megarl.models.weight_map import HeadKind, Weight
from megarl.parallel.checkpoint.dcp import DcpReader, memory_of
from megarl.parallel.checkpoint.index import Shard, check_cover

_OPTIMIZER = "optimizer."  # prefix of the names of optimizer states
_ALIGNED = 8  # bytes; alignment of the start of safetensors' data


def conversion_directory(target: Path) -> ConversionDirectory:
    """Return the conversion directory for the Hugging Face directory `target`."""
    return ConversionDirectory(target, target.parent / f".{target.name}.partial", target.parent / f".{target.name}.journal")


def find_step(path: Path) -> Path:
    """Return the step directory that a path refers to: the path itself, or the newest step of a run or of a directory of steps."""
    if not path.is_dir():
        raise ConfigError(f"convert: no such directory: {path}")
    if is_step(path):
        return path
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    finished = [entry.path for entry in listing(root, contents=False) if entry.finished]
    if not finished:
        raise ConfigError(f"convert: {path} has no step directories")
    return finished[0]


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the Hugging Face files."""

    file: str
    start: int  # byte offset
    info: TensorInfo


class ToHF(Conversion):
    """The conversion of a step directory's model into a Hugging Face directory.

    Args:
        step: the step directory.
        target: the Hugging Face directory to write.
        model: the model's name in the step directory; None: the only one or, of several, "policy".
        like: a Hugging Face directory with config.json and tokenizer; None: use those stored in the step.
        dtype: the dtype to cast to, by torch's name; None: every tensor keeps its own.
        shard_bytes: maximum size of a file (unless a single parameter is larger).

    Raises:
        ConfigError: the step is incomplete, does not have the model, or has different tensors for it.
    """

    def __init__(self, step: Path, target: Path, *, model: str | None, like: Path | None, dtype: str | None, shard_bytes: int) -> None:
        self._directory, self._cast = conversion_directory(target), dtype
        self._step = _whole(step)
        self._model = _model(self._step, model)
        self._hf = like if like is not None else step / self._model / HF
        self._description = self._read_description(like)
        self._reader = DcpReader(self._step, self._model)
        self._weights = {key: shape for key, shape in self._reader.shapes.items() if not key.startswith(_OPTIMIZER)}
        self._head: HeadKind = "value" if HEAD in self._weights else "lm"
        self.items = make_items(self._description, self._head, self._dtype, NAMES[dtype] if dtype is not None else None)
        self._audit()
        self._shards = cut_shards(self.items, shard_bytes, stacked=self._description.family.stacked)
        self.units = cut_units(self.items, self._shards)
        self._slots, self._headers = self._lay_out(self._shards)
        self._expected = self._converted_before()

    def _read_description(self, like: Path | None) -> ModelDescription:
        if like is None and not (self._hf / CONFIG).is_file():
            raise ConfigError(
                f"convert: {self._step.path / self._model} has no {HF}/{CONFIG}: name a directory that has one (--like HF_DIR)"
            )
        model = ModelDescription.read(self._hf)
        for key, given in model.identity.items():
            if (saved := self._step.manifest.models[self._model].get(key, given)) != given:
                raise ConfigError(f"convert: {self._step.path / self._model}: {key} is {saved!r}, and {self._hf / CONFIG} has {given!r}")
        own = self._step.path / self._model / HF
        if like is not None and (own / CONFIG).is_file():
            for key, (saved, given) in differences(ModelDescription.read(own), model).items():
                raise ConfigError(f"convert: {own / CONFIG}: {key} is {saved!r}, and {given!r} in {self._hf / CONFIG} (--like)")
        return model

    def _dtype(self, weight: Weight, name: CheckpointName) -> str:
        if name.key not in self._weights:
            raise ConfigError(f"convert: {self._step.path / self._model} lacks {name.key} of shape {list(name.extents + name.shape)}")
        return next(known for known, dtype in DTYPES.items() if dtype == self._reader.dtypes[name.key])

    def _audit(self) -> None:
        """Raise ConfigError unless names and shapes are those of the model and every element is stored exactly once."""
        folder, asked = self._step.path / self._model, {item.name.key: item for item in self.items}
        for key, item in asked.items():
            shape, expected = self._weights[key], item.name.extents + item.name.shape
            padded = item.weight.op.pads and shape[1:] == expected[1:] and shape[0] >= expected[0]
            if shape != expected and not padded:
                raise ConfigError(f"convert: {folder}: {key} has shape {list(shape)}, expected {list(expected)} by {CONFIG}")
        extra = sorted(self._weights.keys() - asked.keys())
        if extra:
            raise ConfigError(f"convert: {folder} holds {extra[0]}, which the model does not have ({len(extra)} such tensors)")
        try:
            check_cover(self._reader.shards(self._weights))
        except ValueError as error:
            raise ConfigError(f"convert: {folder}: {error}") from None

    def _lay_out(self, shards: list[int]) -> tuple[dict[str, Slot], dict[str, bytes]]:
        """Return the place of every tensor, and the header of every file."""
        slots: dict[str, Slot] = {}
        headers: dict[str, bytes] = {}
        for number, start in enumerate(shards):
            stop = shards[number + 1] if number + 1 < len(shards) else len(self.items)
            file = SINGLE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            at, found = 0, []
            for item in self.items[start:stop]:
                for name, shape in zip(item.weight.hf, item.weight.op.shapes, strict=True):
                    info = TensorInfo(shape, item.target, self._directory.partial / file, at)
                    stack, index = stack_of(name) if self._description.family.stacked and item.weight.expert is not None else (name, -1)
                    if index >= 0:  # the entry grows with each expert
                        first, shape = entries.get(stack, {"data_offsets": [at]})["data_offsets"][0], (index + 1, *shape)
                        entries[stack] = {"dtype": item.target, "shape": list(shape), "data_offsets": [first, at + info.size]}
                    else:
                        entries[name] = {"dtype": item.target, "shape": list(shape), "data_offsets": [at, at + info.size]}
                    found.append((name, info))
                    at += info.size
            text = json.dumps(entries, separators=(",", ":")).encode()
            text += b" " * (-len(text) % _ALIGNED)
            headers[file] = len(text).to_bytes(8, "little") + text
            data = len(headers[file])
            for name, info in found:
                slots[name] = Slot(file, data + info.start, TensorInfo(info.shape, info.dtype, info.file, data + info.start))
        return slots, headers

    def _converted_before(self) -> dict[str, str]:
        """Return the hash that each tensor had in the Hugging Face directory from which this step was converted; empty if unknown."""
        name = f"{self._model}/{CONVERSION}"
        if name not in self._step.manifest.files:
            return {}
        given = json.loads(self._step.read(name))
        if given["dtype"] is not None:
            return {}
        return {key: entry["xxh128"] for key, entry in given["tensors"].items()}

    def plan(self) -> dict[str, Any]:
        stats = {name: (self._step.path / name).stat() for name in self._step.manifest.files}
        files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        options = {"model": self._model, "dtype": self._cast, "like": str(self._hf), "shards": self._shards}
        return {"to": "hf", "source": str(self._step.path.resolve()), "files": files, "options": options}

    def check_source(self) -> None:
        own = {path: record for path, record in self._step.files.items() if path.is_relative_to(self._hf)}
        for path, fault in damaged(own).items():  # of the tensors, reading compares the hashes
            raise ConfigError(f"convert: {path}: {fault}")

    @torch.no_grad()
    def convert(self, unit: Unit, control: Control) -> UnitRecord:
        hashes: dict[str, str] = {}
        file = self._slots[unit.items[0].weight.hf[0]].file
        self._directory.partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._directory.partial / file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            for item in unit.items:
                with control.parameter(item):
                    self._write(item, descriptor, hashes)
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._directory.partial / file)) from None
        finally:
            os.close(descriptor)
        return {"xxh128": hashes}

    def _write(self, item: PlannedParameter, descriptor: int, hashes: dict[str, str]) -> None:
        packed = self._read(item).to(DTYPES[item.target]).reshape(item.weight.op.packed_shape)
        for name, tensor in zip(item.weight.hf, item.weight.op.unpack(packed), strict=True):
            tensor = tensor.contiguous()
            hashes[name] = hash_of(tensor)
            if self._cast is None and self._expected.get(name, hashes[name]) != hashes[name]:
                raise ConfigError(f"convert: {self._step.path / self._model}: {name} is not what the step was converted from: {CONVERSION}")
            _put(descriptor, memory_of(tensor), self._slots[name].start)

    def _read(self, item: PlannedParameter) -> Tensor:
        """Read the whole parameter, without padding."""
        name = item.name
        offset, size = name.index + (0,) * len(name.shape), (1,) * len(name.index) + name.shape
        return self._reader.read(Shard(name.key, name.extents + name.shape, offset, size, DTYPES[item.source]))

    def verify(self, unit: Unit, record: UnitRecord) -> bool:
        names = [name for item in unit.items for name in item.weight.hf]
        file = self._directory.partial / self._slots[names[0]].file
        last = self._slots[names[-1]].info
        if not file.exists() or file.stat().st_size < last.start + last.size:
            return False
        return all(digest_of(self._slots[name].info) == record["xxh128"][name] for name in names)

    def complete(self, records: Mapping[int, UnitRecord]) -> None:
        hashes: dict[str, str] = {}
        for record in records.values():
            assert not hashes.keys() & record["xxh128"].keys(), "a tensor was converted twice"
            hashes |= record["xxh128"]
        assert hashes.keys() == self._slots.keys(), "not every tensor was converted once"
        for file, header in self._headers.items():
            descriptor = os.open(self._directory.partial / file, os.O_RDWR)
            try:
                _put(descriptor, header, 0)
            finally:
                os.close(descriptor)
        files = described(self._hf, self._cast, self._changes())
        if len(self._headers) > 1:
            place = (lambda name: stack_of(name)[0]) if self._description.family.stacked else str
            index = dict(sorted({place(name): slot.file for name, slot in self._slots.items()}.items()))
            size = sum(slot.info.size for slot in self._slots.values())
            files[INDEX] = (json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2) + "\n").encode()
        files[CONVERSION] = json.dumps(self._report(hashes), indent=1).encode()
        write_files(self._directory.partial, files)

    def _changes(self) -> dict[str, Any]:
        return {} if self._head == self._description.head else self._description.labels(self._head)

    def _report(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """Return the contents of conversion.json: every tensor written, its hash, and the parameter from which it was made."""
        found = {}
        for item in self.items:
            megatron = "".join([item.name.key, *(f"[{index}]" for index in item.name.index)])
            for name, shape in zip(item.weight.hf, item.weight.op.shapes, strict=True):
                found[name] = {"dtype": item.target, "shape": list(shape), "xxh128": hashes[name], "megatron": megatron}
        optimizer = sorted(key for key in self._reader.shapes if key.startswith(_OPTIMIZER))
        return {
            "format": 1,
            "to": "hf",
            "source": str((self._step.path / self._model).resolve()),
            "dtype": self._cast,
            "read": totals([(item.name.shape, item.source) for item in self.items]),
            "written": totals([(slot.info.shape, slot.info.dtype) for slot in self._slots.values()]),
            "compared_with_the_original": len(self._expected.keys() & hashes.keys()) if self._cast is None else 0,
            "left_out": dict.fromkeys(optimizer, "optimizer"),
            "tensors": found,
        }


def _whole(path: Path) -> SavedStep:
    entry = verify(path, contents=False)
    if entry.saved is None:
        raise ConfigError("\n".join(f"convert: {path}: {fault}" for fault in entry.faults))
    return entry.saved


def _model(step: SavedStep, name: str | None) -> str:
    names = sorted(step.manifest.models)
    if name is None:
        name = names[0] if len(names) == 1 else "policy"
    if name not in names:
        raise ConfigError(f"convert: {step.path} has no model {name!r} (--model): it has {', '.join(names)}")
    return name


def _put(descriptor: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
