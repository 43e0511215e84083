"""A checkpoint that Megatron-LM, or a program based on it (slime, verl), wrote in the format torch_dist, as the source of a conversion.

Its weights are found by name (`stored_names`), and every shape is checked against config.json. `.metadata`, a pickle, is read without
executing anything (`dcp_index`), tensors with torch's `weights_only`; `common.pt` and pickled objects are never opened.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.convert.audit import MTP, hash_of, totals
from megarl.convert.plan import PlannedParameter, dtype_name
from megarl.errors import ConfigError
from megarl.models.checkpoint_names import HEAD, CheckpointName
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.models.hf import CONFIG
from megarl.models.stored_names import StoredPart, stored_parts
from megarl.models.weight_map import OUTPUT, Weight
from megarl.parallel.checkpoint.dcp import METADATA, DcpReader
from megarl.parallel.checkpoint.dcp_index import read_dcp_index
from megarl.parallel.checkpoint.index import Shard, check_cover

TRACKER = "latest_checkpointed_iteration.txt"
DIST = "dist_ckpt"  # verl's folder of a checkpoint
ACTOR = "actor"  # verl's folder of the policy
SLOT = "model"  # verl's folder of the weights in its second layout; the first has `DIST` in the model's own folder
EMBEDDING = "embedding.word_embeddings.weight"
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")  # beginning of the names of optimizer states
_PREDICTORS = "mtp."  # beginning of the names of multi-token prediction layers
_ROWS = 4096  # rows compared at a time
_STEP = re.compile(r"iter_\d+|global_step_\d+|release")


def find_dcp(path: Path, model: str | None) -> Path | None:
    """Return the folder with the checkpoint that a path refers to: the path itself, or the one that its tracker names. None: there is none.

    Args:
        path: a checkpoint, or a directory of checkpoints: of Megatron-LM or slime (`iter_0000010`) or verl (`global_step_10`).
        model: the model's folder in a checkpoint of verl; None: "actor".

    Raises:
        ConfigError: there are checkpoints, but none in torch_dist, or no tracker that names one of them; or the weights are Hugging Face's.
    """
    if (path / TRACKER).is_file():
        path = _newest(path)
    elif not _STEP.fullmatch(path.name) and (steps := sorted(entry.name for entry in path.iterdir() if _STEP.fullmatch(entry.name))):
        raise ConfigError(f"convert: {path} has no {TRACKER}: name one of its checkpoints, such as {path / steps[-1]}")
    roots = [path, path / (model or ACTOR)]
    location = next((folder for root in roots for folder in (root, root / DIST, root / SLOT / DIST) if (folder / METADATA).is_file()), None)
    for folder in (root / SLOT / "huggingface" for root in roots):
        if location is None and any(folder.glob("*.safetensors")):
            raise ConfigError(f"convert: {path}: its weights are in {folder}, a Hugging Face directory already")
    if location is None and (_STEP.fullmatch(path.name) or any(path.glob("mp_rank_*"))):
        raise ConfigError(f"convert: {path} holds no checkpoint in Megatron's torch_dist format (no {METADATA}), and no other is read")
    return location


def _newest(root: Path) -> Path:
    with (root / TRACKER).open("rb") as stream:
        tracker = stream.read(100).decode(errors="replace").strip()
    names = ["release"] if tracker == "release" else []
    if tracker.isascii() and tracker.isdigit():
        names = [f"iter_{int(tracker):07d}", f"global_step_{int(tracker)}"]
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise ConfigError(f"convert: {root / TRACKER} says {tracker!r}, and there is no such checkpoint")


class DcpSource:
    """A checkpoint in torch_dist format.

    Args:
        path: its folder.
        like: a Hugging Face directory with config.json and tokenizer.
        drop_mtp: leave out multi-token prediction layers.
        drop_images: as of `check_checkpoint`: `like` is of text and images, and the checkpoint of its language model.

    Raises:
        ConfigError: one line: whatever `read_dcp_index` refuses, or other names, shapes or dtypes than config.json's model has.
    """

    expected: dict[str, str] = {}  # no hashes are known of what another program wrote
    kept: tuple[str, ...] = ()  # whose multi-token prediction layers have other names
    predictors: Path | None = None

    def __init__(self, path: Path, like: Path, drop_mtp: bool, drop_images: bool = False) -> None:
        self.path, self.hf = path, like
        self.model = ModelDescription.read(like, drop_images=drop_images)
        index = read_dcp_index(path)
        self._tensors, self._reader = index.tensors, DcpReader(path, index.tensors)
        self.left_out = dict.fromkeys(index.objects, "not a tensor")
        self.left_out |= {key: "optimizer" for key in index.tensors if _OPTIMIZER.match(key)}
        predictors = [key for key in index.tensors if key.startswith(_PREDICTORS)]
        if predictors and not drop_mtp:
            raise ConfigError(
                f"convert: {path} holds {predictors[0]} and {len(predictors) - 1} more {MTP} tensors (--drop-mtp leaves them out)"
            )
        self.left_out |= dict.fromkeys(predictors, MTP)
        self.head: HeadKind = self._head_kind()
        if self.model.tied and self.head == "lm" and OUTPUT in index.tensors:
            self._check_tied()
            self.left_out[OUTPUT] = "the embedding once more"
        self._parts = self._find_parts()
        predicts = bool(self.model.family.predictors(self.model.config))
        self.changes = self.model.labels(self.head) if self.head != self.model.head or predicts else {}

    def _head_kind(self) -> HeadKind:
        heads = [self._tensors[key].shape for key in (HEAD, OUTPUT) if key in self._tensors]
        return "value" if heads and heads[0][:1] == (1,) else "lm"

    def _find_parts(self) -> dict[str, tuple[StoredPart, ...]]:
        weights = [weight for weight in self.model.weights(self.head) if not weight.alias]
        try:
            return stored_parts(weights, self.model.sizes, self._tensors.keys() - self.left_out.keys())
        except ConfigError as error:
            raise ConfigError(f"convert: {self.path} {error}, by {self.hf / CONFIG}") from None

    def _check_tied(self) -> None:
        """Raise ConfigError if the stored output layer is not the embedding to which config.json ties it."""
        rows, [*_, hidden] = self.model.vocab, self._tensors[OUTPUT].shape
        for start in range(0, rows, _ROWS):
            count = min(_ROWS, rows - start)
            one, two = (
                self._reader.read(Shard(key, self._tensors[key].shape, (start, 0), (count, hidden), self._tensors[key].dtype))
                for key in (EMBEDDING, OUTPUT)
            )
            if not torch.equal(one, two):
                raise ConfigError(f"convert: {self.path}: {self.hf / CONFIG} ties {OUTPUT} to {EMBEDDING}, but their values differ")

    def dtype(self, weight: Weight, names: tuple[CheckpointName, ...]) -> str:
        """Return the dtype of a parameter, by safetensors' name."""
        dtypes = {self._tensors[part.key].dtype for part in self._parts[weight.name]}
        if len(dtypes) > 1:
            raise ConfigError(f"convert: {self.path}: {weight.name} is stored as {' and '.join(sorted(map(str, dtypes)))}")
        return dtype_name(dtypes.pop(), f"{self.path}: {self._parts[weight.name][0].key}")

    def audit(self, items: Sequence[PlannedParameter]) -> None:
        """Raise ConfigError unless all shapes are those of the model and every element is stored exactly once."""
        for item in items:
            for part in self._parts[item.weight.name]:
                shape, expected = self._tensors[part.key].shape, part.extents + part.shape
                padded = item.weight.op.pads and shape[1:] == expected[1:] and shape[0] >= expected[0]
                if shape != expected and not padded:
                    raise ConfigError(
                        f"convert: {self.path}: {part.key} has shape {list(shape)}, expected {list(expected)} by {self.hf / CONFIG}"
                    )
        try:
            check_cover(self._reader.shards(self._tensors.keys() - self.left_out.keys()))
        except ValueError as error:
            raise ConfigError(f"convert: {self.path}: {error}") from None

    def plan(self) -> dict[str, Any]:
        """Return what identifies the source."""
        stats = {file.name: file.stat() for file in sorted(self.path.iterdir()) if file.name == METADATA or file.suffix == ".distcp"}
        files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        return {"source": str(self.path.resolve()), "files": files, "options": {"like": str(self.hf), "mtp": MTP in self.left_out.values()}}

    def check(self) -> None:
        """Do nothing: there are no hashes, and places and shapes have been compared."""

    def parameter(self, item: PlannedParameter) -> Tensor:
        """Read a whole parameter, without padding."""
        tensors = []
        for part in self._parts[item.weight.name]:
            offset, size = part.index + (0,) * len(part.shape), (1,) * len(part.index) + part.shape
            shard = Shard(part.key, part.extents + part.shape, offset, size, self._tensors[part.key].dtype)
            tensors.append(self._reader.read(shard).reshape(part.shape))
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def tensors(self, item: PlannedParameter) -> Iterator[tuple[Tensor, str]]:
        """Read a parameter, and yield its Hugging Face tensors one by one, each with its hash."""
        for part in item.weight.op.unpack(item.weight.op.chunk(self.parameter(item), 1)):
            tensor = part.contiguous()
            yield tensor, hash_of(tensor)

    def fresh(self, names: Collection[str]) -> list[str]:
        """Return which of these tensors the source does not have: none."""
        return []

    def totals(self, items: Sequence[PlannedParameter]) -> dict[str, int]:
        """Return the number of parameters that are read, and their total numbers and bytes."""
        return totals([(name.shape, item.source) for item in items for name in item.names])
