"""Convert a Hugging Face directory, or another program's checkpoint, into a step directory with one model in torch_dist format."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoints.files import Content, FileRecord, HashedFile, read_record, write_file
from megarl.checkpoints.step_writer import point
from megarl.checkpoints.steps import HF, MANIFEST, PARTIAL, Manifest, encode, step_name, versions
from megarl.convert.audit import Source, totals
from megarl.convert.conversion_directory import ConversionDirectory, UnitRecord
from megarl.convert.dcp_source import DcpSource
from megarl.convert.engine import Control, Conversion
from megarl.convert.plan import DTYPES, NAMES, PlannedParameter, Unit, check_cut, cut_units, make_items, place, ranks_of, shards, shards_of
from megarl.models.hf import CONVERSION
from megarl.models.hf_writer import described
from megarl.models.predictors import KEPT
from megarl.parallel.checkpoint.dcp import METADATA_FILES, write_metadata
from megarl.parallel.checkpoint.index import Location, Shard, check_cover

MODELS = {"lm": "policy", "value": "critic"}  # default name of a model with this head
STEP = 0


def conversion_directory(root: Path) -> ConversionDirectory:
    """Return the conversion directory for the step directory in `root`."""
    name = step_name(STEP)
    return ConversionDirectory(root / name, root / (name + PARTIAL), root / f".{name}.journal")


class ToMegatron(Conversion):
    """The conversion of a Hugging Face directory, or of another program's checkpoint, into a step directory.

    Args:
        source: what is converted.
        root: the directory in which the step directory is written.
        model: the model's name in the step directory; None: "policy", or "critic" with a scalar head.
        dtype: the dtype to cast to, by torch's name; None: every tensor keeps its own.
        tp: tensor-parallel size for which the checkpoint is split; any layout can read it.
        etp: the same for experts.

    Raises:
        ConfigError: the source is incomplete, or the options do not suit it.
    """

    def __init__(self, source: Source | DcpSource, root: Path, *, model: str | None, dtype: str | None, tp: int, etp: int) -> None:
        self._directory, self._source = conversion_directory(root), source
        self._model, self._cast, self._tp, self._etp = model or MODELS[source.head], dtype, tp, etp
        self.items = make_items(source.model, source.head, source.dtype, NAMES[dtype] if dtype is not None else None)
        source.audit(self.items)
        check_cut(self.items, tp, etp)
        self.units = cut_units(self.items)

    def plan(self) -> dict[str, Any]:
        plan = self._source.plan()
        options = {"head": self._source.head, "model": self._model, "dtype": self._cast, "tp": self._tp, "etp": self._etp}
        return {"to": "megatron", **plan, "options": plan["options"] | options}

    def check_source(self) -> None:
        """Do nothing: the names and shapes have been compared, and the conversion reads every tensor anyway."""

    @property
    def _folder(self) -> Path:
        return self._directory.partial / self._model

    def _file(self, unit: Unit) -> Path:
        return self._folder / f"__{unit.index}_0.distcp"

    @torch.no_grad()
    def convert(self, unit: Unit, control: Control) -> UnitRecord:
        torch.serialization.set_crc32_options(False)  # for this thread; torch never checks CRCs; megarl has its own hashes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(unit).unlink(missing_ok=True)
        hashes: dict[str, str] = {}
        places: list[tuple[int, int, str]] = []
        with HashedFile(self._file(unit)) as file:
            for item in unit.items:
                with control.parameter(item):
                    parameter, ranks = self._parameter(item, hashes), ranks_of(item.weight, self._tp, self._etp)
                    for name, piece in zip(item.names, parameter.split([name.shape[0] for name in item.names]), strict=True):
                        for shard in shards_of(name, item, ranks):
                            torch.save(_part(piece, shard), file)  # type: ignore[arg-type]  # needs only `write` and `flush`
                            file.check()
                            places.append(file.end_part())
                    del parameter, piece
            record = file.close()
        return {"xxh128": hashes, "places": places, "file": [record.size, record.xxh128]}

    def _parameter(self, item: PlannedParameter, hashes: dict[str, str]) -> Tensor:
        """Return the whole parameter, in the dtype to write."""
        tensors, source = [], self._source.tensors(item)
        for name in item.weight.hf:
            tensor, hashes[name] = next(source)
            tensors.append(tensor.to(DTYPES[item.target]))
            del tensor
        del source  # with what it has read
        return item.weight.op.parameter(item.weight.op.pack(tensors))

    def verify(self, unit: Unit, record: UnitRecord) -> bool:
        try:
            return read_record(self._file(unit)) == FileRecord(*record["file"])
        except FileNotFoundError:
            return False

    def complete(self, records: Mapping[int, UnitRecord]) -> None:
        written: list[tuple[Shard, Location]] = []
        for unit in self.units:
            pieces = [shard for item in unit.items for shard in shards(item, self._tp, self._etp)]
            locations = [Location(self._file(unit).name, *place) for place in records[unit.index]["places"]]
            written += zip(pieces, locations, strict=True)
        check_cover(shard for shard, _ in written)
        hashes = _merged(records)
        files = {f"{self._model}/{self._file(unit).name}": FileRecord(*records[unit.index]["file"]) for unit in self.units}
        files |= {f"{self._model}/{name}": record for name, record in self._metadata(written).items()}
        source = self._source
        files_of_source = described(source.hf, self._cast, source.changes, drop_images=source.model.drop_images)
        for name, data in files_of_source.items():
            files[f"{self._model}/{HF}/{name}"] = _rewrite(self._folder / HF / name, data)
        predictors = self._source.model.predictors
        if predictors is not None:
            files[f"{self._model}/{HF}/{KEPT}"] = _rewrite(self._folder / HF / KEPT, predictors)
        report = json.dumps(self._report(hashes), indent=1).encode()
        files[f"{self._model}/{CONVERSION}"] = _rewrite(self._folder / CONVERSION, report)
        identity = self._source.model.identity
        manifest = Manifest(STEP, 0, {}, versions(), {self._model: {**identity, "optimizer": None}}, files)
        _rewrite(self._directory.partial / MANIFEST, encode(manifest))

    def _metadata(self, written: list[tuple[Shard, Location]]) -> dict[str, FileRecord]:
        for name in METADATA_FILES:  # left by an interrupted attempt
            (self._folder / name).unlink(missing_ok=True)
        return write_metadata(self._folder, written)

    def _report(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """Return the contents of conversion.json: every tensor of the source, its hash, and the parameter that now contains it."""
        tensors, written = {}, []
        for item in self.items:
            written += [(name.shape, item.target) for name in item.names]
            for name, shape in zip(item.weight.hf, item.weight.op.shapes, strict=True):
                tensors[name] = {"dtype": item.source, "shape": list(shape), "xxh128": hashes[name], "megatron": place(item)}
        assert tensors.keys() == hashes.keys(), "not every tensor was converted once"
        return {
            "format": 1,
            "to": "megatron",
            "source": str(self._source.path.resolve()),
            "dtype": self._cast,
            "read": self._source.totals(self.items),
            "written": totals(written),
            "fresh": self._source.fresh(tensors),
            "left_out": dict(self._source.left_out),
            "kept": sorted(self._source.kept),
            "tensors": tensors,
        }


def point_latest(root: Path) -> None:
    """Make `latest` name the step directory."""
    point(root, step_name(STEP))


def _part(piece: Tensor, shard: Shard) -> Tensor:
    own = slice(len(shard.size) - piece.ndim, None)
    part = piece
    for axis, (start, size) in enumerate(zip(shard.offset[own], shard.size[own], strict=True)):
        part = part.narrow(axis, start, size)
    if part.numel() * part.itemsize != part.untyped_storage().nbytes():
        part = part.clone(memory_format=torch.contiguous_format)  # torch.save writes a tensor's whole storage
    return part.view(shard.size)


def _merged(records: Mapping[int, UnitRecord]) -> dict[str, str]:
    hashes: dict[str, str] = {}
    for record in records.values():
        assert not hashes.keys() & record["xxh128"].keys(), "a tensor was converted twice"
        hashes |= record["xxh128"]
    return hashes


def _rewrite(path: Path, data: Content) -> FileRecord:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return write_file(path, data)
