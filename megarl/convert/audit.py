"""An audit of a Hugging Face directory: every tensor is either used exactly once, or left out for a recorded reason."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_128, xxh3_128_hexdigest

from megarl.checkpoints.files import StoredFile
from megarl.config import Mtp
from megarl.convert.plan import STORED, PlannedParameter
from megarl.errors import ConfigError
from megarl.models.checkpoint_names import CheckpointName
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint
from megarl.models.family import HeadKind
from megarl.models.hf import INDEX, TensorInfo, header, inventory, scales_of_activations
from megarl.models.quantized import MXFP4, dequantized, from_mxfp4
from megarl.models.weight_map import Weight
from megarl.models.weight_ops import Shape
from megarl.parallel.checkpoint.dcp import memory_of

MTP, IMAGES = "multi-token prediction", "of images"
_FRESH = 0  # seed of a head that the source does not have
_PIECE = 16 << 20  # bytes hashed at a time if the tensor is not loaded


@dataclass(frozen=True)
class Source:
    """A Hugging Face directory whose tensors are exactly those that its config.json requires, each with its scales if it is quantised."""

    path: Path
    model: ModelDescription
    head: HeadKind  # which the converted model is to have; "value" may start from a language model
    held: Mapping[str, TensorInfo]  # the tensors that are used
    left_out: Mapping[str, str]  # name of every other tensor -> why it is not used
    kept: tuple[str, ...] = ()  # of those used, multi-token prediction layers, which go into a file of their own

    @property
    def hf(self) -> Path:
        """The directory that has config.json and tokenizer."""
        return self.path

    @property
    def changes(self) -> dict[str, Any]:
        """The keys of config.json whose values differ after the conversion."""
        same = self.head == self.model.head and MTP not in self.left_out.values()
        return {} if same else self.model.labels(self.head)

    def plan(self) -> dict[str, Any]:
        """Return what identifies the source: the size and modification time of every file that is read."""
        stats = {file.name: file.stat() for file in sorted({info.file for info in _stored(self.held).values()})}
        files = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        return {"source": str(self.path.resolve()), "files": files, "options": {"kept": len(self.kept), "tensors": len(self.held)}}

    def dtype(self, weight: Weight, names: tuple[CheckpointName, ...]) -> str:
        """Return the dtype of a parameter, by safetensors' name."""
        dtypes = {self.held[one].read_dtype for one in weight.hf if one in self.held}
        if len(dtypes) > 1:
            raise ConfigError(f"convert: {self.path}: {' and '.join(weight.hf)} are stored as {' and '.join(sorted(dtypes))}")
        return dtypes.pop() if dtypes else "F32"  # a fresh head

    def audit(self, items: Sequence[PlannedParameter]) -> None:
        """Do nothing: `audit` has compared all names and shapes."""

    def tensors(self, item: PlannedParameter) -> Iterator[tuple[Tensor, str]]:
        """Read the tensors of a parameter one by one, each with its hash; a head that the source does not have is fresh."""
        for name in item.weight.hf:
            yield read_tensor(self.held[name]) if name in self.held else _fresh(item)

    def fresh(self, names: Collection[str]) -> list[str]:
        """Return which of these tensors the source does not have."""
        return sorted(set(names) - self.held.keys())

    def totals(self, items: Sequence[PlannedParameter]) -> dict[str, int]:
        """Return the number of tensors that are read, scales included, and their total parameters and bytes."""
        return totals([(info.shape, info.dtype) for info in _stored(self.held).values()])


def audit(path: Path, head: HeadKind, *, mtp: Mtp | None, drop_images: bool) -> Source:
    """Account for every tensor of a directory, for a model with `head`. Reads only headers, and tied weights if they are stored twice.

    Args:
        path: the Hugging Face directory.
        head: the head that the model is to have; "value" may start from a language model.
        mtp: multi-token prediction layers are allowed, and left out or kept.
        drop_images: as of `check_checkpoint`.

    Returns:
        The tensors that are used, and why the others are not.

    Raises:
        ConfigError: one line: whatever `check_checkpoint` refuses, bytes of a file that belong to no tensor or to two, a tensor that the
            index does not name.
    """
    if mtp == "keep" and head == "value":
        raise ConfigError("convert: --keep-mtp: a model with a scalar head has no multi-token prediction layers")
    check_checkpoint(path, head, mtp=mtp, drop_images=drop_images)
    model = ModelDescription.read(path, mtp=mtp or "drop", drop_images=drop_images)
    tensors = inventory(path, drop_images=drop_images)
    stored_tensors, activations = _stored(tensors), scales_of_activations(tensors)
    for file in sorted({info.file for info in stored_tensors.values()}):
        _check_file(file, stored_tensors)
    used = {name for weight in model.weights(head) for name in weight.hf}
    left_out = {}
    predictors, optional = model.family.predictors(model.config), set(model.family.optional(model.config))
    kept = model.predictors.held() if model.predictors is not None else {}
    for name in tensors.keys() - (used & model.expected().keys()) - kept.keys():
        if name.startswith(predictors):
            left_out[name] = MTP
        elif model.family.images is not None and name.startswith(model.family.images.tower):
            left_out[name] = IMAGES
        elif name in activations:
            left_out[name] = "scales of quantised activations"
        elif name in optional:
            left_out[name] = "what config.json gives" if not name.startswith("lm_head") else "the embedding once more"
        else:
            assert model.head != head, f"{name} is not accounted for"
            left_out[name] = "another head"
    return Source(path, model, head, {name: info for name, info in tensors.items() if name not in left_out}, left_out, tuple(kept))


def _check_file(file: Path, tensors: Mapping[str, TensorInfo]) -> None:
    inside = header(file)
    for name in inside:
        if name not in tensors:
            raise ConfigError(f"convert: {file} holds the tensor {name}, which {INDEX} does not name")
        if tensors[name].file != file:
            raise ConfigError(f"convert: {file} and {tensors[name].file.name} both hold the tensor {name}")
    at = min((info.start for info in inside.values()), default=file.stat().st_size)
    for name, info in sorted(inside.items(), key=lambda pair: (pair[1].start, pair[1].size)):
        if info.start != at:
            raise ConfigError(f"convert: {file}: {name} begins at byte {info.start}, and what is before it ends at {at}")
        at += info.size
    if at != file.stat().st_size:
        raise ConfigError(f"convert: {file} has {file.stat().st_size} bytes, and its tensors end at {at}")


def _stored(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return all tensors of the files: those held, or the stacks that they are parts of, and the scales of the quantised ones."""
    scales = {info.scales.name: info.scales.info for info in tensors.values() if info.scales is not None}
    stacks = [info.stack for info in tensors.values() if info.stack is not None and info.stack.index == 0]
    whole = {name: one for stack in stacks for name, one in zip(stack.names, stack.infos, strict=True)}
    return {**{info.name or name: info for name, info in tensors.items() if info.stack is None}, **whole, **scales}


def digest_of(info: TensorInfo) -> str:
    """Return the XXH128 hash of a tensor's bytes on disk, using bounded memory."""
    digest, buffer = xxh3_128(), bytearray(min(_PIECE, max(info.size, 1)))
    with StoredFile(info.file) as file:
        at, end = info.start, info.start + info.size
        while at < end:
            view = memoryview(buffer)[: end - at]
            file.read(at, view)
            digest.update(view)
            at += len(view)
    return digest.hexdigest()


def read_tensor(info: TensorInfo) -> tuple[Tensor, str]:
    """Read a tensor of a safetensors file into its own memory, in bfloat16 if it is quantised; return it and its hash."""
    if info.dtype == MXFP4 and info.stack is not None:
        tensor = from_mxfp4(_read(info.stack.part(0)), _read(info.stack.part(1))).t().contiguous()
        return tensor, hash_of(tensor)
    tensor = _read(info)
    if info.stack is not None and info.stack.turned:
        tensor = tensor.view(info.shape[::-1]).t().contiguous()
    if info.scales is not None:
        tensor = dequantized(tensor, _read(info.scales.info), info.scales.block)
    return tensor, hash_of(tensor)


def _read(info: TensorInfo) -> Tensor:
    tensor = torch.empty(info.shape, dtype=STORED[info.dtype])
    with StoredFile(info.file) as file:
        file.read(info.start, memory_of(tensor))
    return tensor


def _fresh(item: PlannedParameter) -> tuple[Tensor, str]:
    """Return a fresh scalar head, initialised like those in training: normal with std 1 / (hidden + 1); and its hash."""
    [shape] = item.weight.op.shapes
    head = torch.empty(shape).normal_(std=1 / (shape[-1] + 1), generator=torch.Generator().manual_seed(_FRESH))
    return head, hash_of(head)


def hash_of(tensor: Tensor) -> str:
    """Return the XXH128 hash of a contiguous tensor's bytes."""
    return xxh3_128_hexdigest(memory_of(tensor))


def totals(shapes: Sequence[tuple[Shape, str]]) -> dict[str, int]:
    """Return the number of tensors, and their total parameters and bytes."""
    numbers = [torch.Size(shape).numel() for shape, _ in shapes]
    size = sum(count * STORED[dtype].itemsize for count, (_, dtype) in zip(numbers, shapes, strict=True))
    return {"tensors": len(shapes), "parameters": sum(numbers), "bytes": size}
