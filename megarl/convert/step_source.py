"""A model in a step directory, as the source of a conversion."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoints.steps import CHECKPOINTS, HF, SavedStep, damaged, is_step, listing, verify
from megarl.config import Mtp
from megarl.convert.audit import MTP
from megarl.convert.plan import PlannedParameter, dtype_name
from megarl.errors import ConfigError
from megarl.models.arithmetic import differences
from megarl.models.checkpoint_names import HEAD, CheckpointName
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.models.hf import CONFIG, CONVERSION
from megarl.models.predictors import KEPT
from megarl.models.weight_map import PREDICTOR, Weight
from megarl.parallel.checkpoint.dcp import DcpReader
from megarl.parallel.checkpoint.index import Shard, check_cover, read_index

_OPTIMIZER = "optimizer."  # prefix of the names of optimizer states


def find_step(path: Path) -> Path | None:
    """Return the step directory that a path refers to: the path itself, or the newest step of a run or of a directory of steps."""
    if is_step(path):
        return path
    root = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    return next((entry.path for entry in listing(root, contents=False) if entry.finished), None)


class StepSource:
    """A model in a step directory.

    Args:
        step: the step directory.
        model: the model's name in it; None: the only one or, of several, "policy".
        like: a Hugging Face directory with config.json and tokenizer; None: use those stored in the step.
        drop_mtp: leave out multi-token prediction layers.
        drop_images: as of `check_checkpoint`: `like` is of text and images, and the step's model is its language model.

    Raises:
        ConfigError: the step is incomplete, does not have the model, or is of another model than `like`.
    """

    def __init__(self, step: Path, model: str | None, like: Path | None, drop_mtp: bool = False, drop_images: bool = False) -> None:
        self._step = _whole(step)
        self._name = _model(self._step, model)
        if self._step.manifest.models[self._name].get("lora") is not None:
            raise ConfigError(
                f"convert: {step / self._name} holds adapters alone (model.lora); the run exports the merged model at its end"
            )
        self.path, self.step = step / self._name, self._step.manifest.step
        self.hf = like if like is not None else self.path / HF
        trained = self._step.manifest.models[self._name].get("mtp") is not None
        self.model = self._read_description(like, "train" if trained and not drop_mtp else "drop", drop_images)
        tensors = read_index(self._step, self._name)
        self._reader = DcpReader(self.path, tensors)
        self.left_out = {key: "optimizer" for key in sorted(tensors) if key.startswith(_OPTIMIZER)}
        if drop_mtp:
            self.left_out |= {key: MTP for key in sorted(tensors) if key.startswith(PREDICTOR)}
        self._weights = {key: tensor.shape for key, tensor in tensors.items() if key not in self.left_out}
        self.head: HeadKind = "value" if HEAD in self._weights else "lm"
        kept = self.path / HF / KEPT
        self.predictors = kept if kept in self._step.files and not drop_mtp else None  # the file of the multi-token prediction layers
        dropped = drop_mtp and (trained or kept in self._step.files)
        self.changes = {} if self.head == self.model.head and not dropped else self.model.labels(self.head)
        self.expected = self._converted_before()

    def _read_description(self, like: Path | None, mtp: Mtp, drop_images: bool) -> ModelDescription:
        if like is None and not (self.hf / CONFIG).is_file():
            raise ConfigError(f"convert: {self.path} has no {HF}/{CONFIG}: name a directory that has one (--like HF_DIR)")
        model = ModelDescription.read(self.hf, mtp=mtp, drop_images=drop_images)
        for key, given in model.identity.items():
            if (saved := self._step.manifest.models[self._name].get(key, given)) != given:
                raise ConfigError(f"convert: {self.path}: {key} is {saved!r}, and {self.hf / CONFIG} has {given!r}")
        own = self.path / HF
        if like is not None and (own / CONFIG).is_file():
            for key, (saved, given) in differences(ModelDescription.read(own), model).items():
                raise ConfigError(f"convert: {own / CONFIG}: {key} is {saved!r}, and {given!r} in {self.hf / CONFIG} (--like)")
        return model

    def _converted_before(self) -> dict[str, str]:
        """Return the hash that each tensor had in the Hugging Face directory from which this step was converted; empty if unknown."""
        name = f"{self._name}/{CONVERSION}"
        if name not in self._step.manifest.files:
            return {}
        given = json.loads(self._step.read(name))
        if given["dtype"] is not None:
            return {}
        return {key: entry["xxh128"] for key, entry in given["tensors"].items()}

    def dtype(self, weight: Weight, names: tuple[CheckpointName, ...]) -> str:
        """Return the dtype of a parameter, by safetensors' name."""
        for name in names:
            if name.key not in self._weights:
                raise ConfigError(f"convert: {self.path} lacks {name.key} of shape {list(name.extents + name.shape)}")
        dtypes = {self._reader.dtypes[name.key] for name in names}
        if len(dtypes) > 1:
            raise ConfigError(f"convert: {self.path}: {weight.name} is stored as {' and '.join(sorted(map(str, dtypes)))}")
        return dtype_name(dtypes.pop(), f"{self.path}: {names[0].key}")

    def audit(self, items: Sequence[PlannedParameter]) -> None:
        """Raise ConfigError unless names and shapes are those of the model and every element is stored exactly once."""
        requests = {name.key: name for item in items for name in item.names}
        for key, name in requests.items():
            shape, expected = self._weights[key], name.extents + name.shape
            padded = name.op.pads and shape[1:] == expected[1:] and shape[0] >= expected[0]
            if shape != expected and not padded:
                raise ConfigError(f"convert: {self.path}: {key} has shape {list(shape)}, expected {list(expected)} by {CONFIG}")
        extra = sorted(self._weights.keys() - requests.keys())
        if extra:
            raise ConfigError(f"convert: {self.path} holds {extra[0]}, which the model does not have ({len(extra)} such tensors)")
        try:
            check_cover(self._reader.shards(self._weights))
        except ValueError as error:
            raise ConfigError(f"convert: {self.path}: {error}") from None

    def plan(self) -> dict[str, Any]:
        """Return what identifies the source."""
        stats = {name: (self._step.path / name).stat() for name in self._step.manifest.files}
        files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        return {"source": str(self._step.path.resolve()), "files": files, "options": {"model": self._name, "like": str(self.hf)}}

    def check(self) -> None:
        """Raise ConfigError if a file that describes the model is damaged; of the tensors, reading compares the hashes."""
        own = {path: record for path, record in self._step.files.items() if path.is_relative_to(self.hf) or path == self.predictors}
        for path, fault in damaged(own).items():
            raise ConfigError(f"convert: {path}: {fault}")

    def parameter(self, item: PlannedParameter) -> Tensor:
        """Read a whole parameter, without padding."""
        pieces = []
        for name in item.names:
            offset, size = name.index + (0,) * len(name.shape), (1,) * len(name.index) + name.shape
            shard = Shard(name.key, name.extents + name.shape, offset, size, self._reader.dtypes[name.key])
            pieces.append(self._reader.read(shard).reshape(name.shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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
