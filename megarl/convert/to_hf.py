"""Convert a model in a Megatron checkpoint, whichever layout saved it, into a Hugging Face directory."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.convert.audit import digest_of, hash_of, totals
from megarl.convert.conversion_directory import ConversionDirectory, UnitRecord
from megarl.convert.dcp_source import DcpSource
from megarl.convert.engine import Control, Conversion
from megarl.convert.plan import DTYPES, NAMES, PlannedParameter, Unit, cut_shards, cut_units, make_items, place
from megarl.convert.step_source import StepSource
from megarl.errors import ConfigError
from megarl.models.hf import CONVERSION, INDEX, SINGLE, TensorInfo, header, stack_of
from megarl.models.hf_writer import described, write_files
from megarl.observe.card import CARD, card, run_of
from megarl.parallel.checkpoint.dcp import memory_of

_ALIGNED = 8  # bytes; alignment of the start of safetensors' data


def conversion_directory(target: Path) -> ConversionDirectory:
    """Return the conversion directory for the Hugging Face directory `target`."""
    return ConversionDirectory(target, target.parent / f".{target.name}.partial", target.parent / f".{target.name}.journal")


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the Hugging Face files."""

    file: str
    start: int  # byte offset
    info: TensorInfo


class ToHF(Conversion):
    """The conversion of a model in a Megatron checkpoint into a Hugging Face directory.

    Args:
        source: the model in a step directory, or another program's checkpoint.
        target: the Hugging Face directory to write.
        dtype: the dtype to cast to, by torch's name; None: every tensor keeps its own.
        shard_bytes: maximum size of a file (unless a single parameter is larger).

    Raises:
        ConfigError: the source has different tensors for the model.
    """

    def __init__(self, source: StepSource | DcpSource, target: Path, *, dtype: str | None, shard_bytes: int) -> None:
        self._target, self._directory, self._source, self._cast = target, conversion_directory(target), source, dtype
        self.items = make_items(source.model, source.head, source.dtype, NAMES[dtype] if dtype is not None else None)
        source.audit(self.items)
        self._family = source.model.family
        self._shards = cut_shards(self.items, shard_bytes, stacked=self._family.stacked)
        self._predictors = header(source.predictors) if source.predictors is not None else {}
        self.units = cut_units(self.items, self._shards)
        self._slots, self._headers = self._lay_out(self._shards)

    def _lay_out(self, shards: list[int]) -> tuple[dict[str, Slot], dict[str, bytes]]:
        """Return the place of every tensor, and the header of every file."""
        slots: dict[str, Slot] = {}
        headers: dict[str, bytes] = {}
        for number, start in enumerate(shards):
            stop = shards[number + 1] if number + 1 < len(shards) else len(self.items)
            file = self._name(number)
            entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            at, infos = 0, []
            for item in self.items[start:stop]:
                for name, shape in zip(item.weight.hf, item.weight.op.shapes, strict=True):
                    info = TensorInfo(shape, item.target, self._directory.partial / file, at)
                    stack, index, parts = stack_of(self._family, name)
                    if index >= 0:  # the entry grows with each expert
                        first = entries.get(stack, {"data_offsets": [at]})["data_offsets"][0]
                        shape = (index // parts + 1, shape[0] * parts, *shape[1:])
                        entries[stack] = {"dtype": item.target, "shape": list(shape), "data_offsets": [first, at + info.size]}
                    else:
                        entries[name] = {"dtype": item.target, "shape": list(shape), "data_offsets": [at, at + info.size]}
                    infos.append((name, info))
                    at += info.size
            text = json.dumps(entries, separators=(",", ":")).encode()
            text += b" " * (-len(text) % _ALIGNED)
            headers[file] = len(text).to_bytes(8, "little") + text
            data = len(headers[file])
            for name, info in infos:
                slots[name] = Slot(file, data + info.start, TensorInfo(info.shape, info.dtype, info.file, data + info.start))
        return slots, headers

    def _name(self, number: int) -> str:
        """Return the name of a file; that of the multi-token prediction layers, if there are any, is the last."""
        files = len(self._shards) + bool(self._predictors)
        return SINGLE if files == 1 else f"model-{number + 1:05d}-of-{files:05d}.safetensors"

    @property
    def done(self) -> bool:
        """Whether the target is there already, converted from this source in this way."""
        try:
            report = json.loads((self._target / CONVERSION).read_text())
        except FileNotFoundError:
            return False
        return [report.get(key) for key in ("to", "source", "dtype")] == ["hf", str(self._source.path.resolve()), self._cast]

    def plan(self) -> dict[str, Any]:
        plan = self._source.plan()
        return {"to": "hf", **plan, "options": {**plan["options"], "dtype": self._cast, "shards": self._shards}}

    def check_source(self) -> None:
        self._source.check()

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
        packed = item.weight.op.chunk(self._source.parameter(item).to(DTYPES[item.target]), 1)
        for name, tensor in zip(item.weight.hf, item.weight.op.unpack(packed), strict=True):
            tensor = tensor.contiguous()
            hashes[name] = hash_of(tensor)
            if self._cast is None and self._source.expected.get(name, hashes[name]) != hashes[name]:
                raise ConfigError(f"convert: {self._source.path}: {name} is not what the step was converted from: {CONVERSION}")
            _put(descriptor, memory_of(tensor), self._slots[name].start)

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
        for file, beginning in self._headers.items():
            descriptor = os.open(self._directory.partial / file, os.O_RDWR)
            try:
                _put(descriptor, beginning, 0)
            finally:
                os.close(descriptor)
        files = {**self._card(), **described(self._source.hf, self._cast, self._source.changes, drop_images=self._source.model.drop_images)}
        if self._source.predictors is not None:
            shutil.copyfile(self._source.predictors, self._directory.partial / self._name(len(self._shards)))
        if len(self._headers) + bool(self._predictors) > 1:
            placed = {stack_of(self._family, name)[0]: slot.file for name, slot in self._slots.items()}
            index = dict(sorted((placed | dict.fromkeys(self._predictors, self._name(len(self._shards)))).items()))
            size = sum(info.size for info in (*(slot.info for slot in self._slots.values()), *self._predictors.values()))
            files[INDEX] = (json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2) + "\n").encode()
        files[CONVERSION] = json.dumps(self._report(hashes), indent=1).encode()
        write_files(self._directory.partial, files)

    def _card(self) -> dict[str, bytes]:
        """Return the model card, if a run has saved the model."""
        source = self._source
        if not isinstance(source, StepSource) or (run := run_of(source.path.parent)) is None:
            return {}
        return {CARD: card(run, source.step, source.head, source.path.name).encode()}

    def _report(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """Return the contents of conversion.json: every tensor written, its hash, and the parameter from which it was made."""
        tensors = {}
        for item in self.items:
            megatron = place(item)
            for name, shape in zip(item.weight.hf, item.weight.op.shapes, strict=True):
                tensors[name] = {"dtype": item.target, "shape": list(shape), "xxh128": hashes[name], "megatron": megatron}
        return {
            "format": 1,
            "to": "hf",
            "source": str(self._source.path.resolve()),
            "dtype": self._cast,
            "read": totals([(name.shape, item.source) for item in self.items for name in item.names]),
            "written": totals([(slot.info.shape, slot.info.dtype) for slot in self._slots.values()]),
            "compared_with_the_original": len(self._source.expected.keys() & hashes.keys()) if self._cast is None else 0,
            "left_out": self._source.left_out,
            "kept": sorted(self._predictors),
            "tensors": tensors,
        }


def _put(descriptor: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
