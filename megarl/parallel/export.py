"""Exports Megatron parameters as Hugging Face tensors: a streamed gather of tensor, expert and pipeline shards to rank 0.

Only the first data-parallel (and context-parallel) replica takes part: in each pipeline stage its ranks gather to the stage's first rank,
which forwards the shards to rank 0 or writes them into files of its own; or each expert-parallel rank keeps its own experts. Every rank
derives the same order from the family's weight map, so the collectives pair up. Raw bytes are moved, not numbers, so any dtype is exact bit
for bit on gloo and NCCL.
"""

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megarl.errors import ConfigError, SaveError
from megarl.models.adapters import PEFT_CONFIG, PEFT_FOLDER, PEFT_WEIGHTS, adapted, factor_weights, peft_config, target_of
from megarl.models.description import ModelDescription
from megarl.models.hf import header
from megarl.models.hf_writer import CheckpointWriter, ShardWriter, stacked
from megarl.models.predictors import KEPT
from megarl.models.weight_map import OUTPUT, Weight
from megarl.parallel.backend import choose
from megarl.parallel.grid import Grid
from megarl.parallel.lora import MergedParameters, factor_parameters, settings_of
from megarl.parallel.weights import head_of, local_parameters, tensor_parallel
from megarl.sync.fingerprint import Fingerprinter
from megarl.sync.wire import TensorName, each
from megarl.text.display import one_line

log = logging.getLogger(__name__)
GATHER_BYTES = 256 << 20  # most bytes of one layer's experts that are gathered together (but at least one expert of each rank)


@dataclass(frozen=True)
class _Batch:
    """Weights that travel together: one dense weight, or one slice of a layer's experts, equally many on each expert-parallel rank."""

    weights: list[Weight]  # by expert-parallel rank, then by expert
    ep: int  # number of expert-parallel ranks that hold them
    owner: int = 0  # pipeline stage that holds them


def export_stacks(
    chunks: Iterable[Any],
    model: ModelDescription,
    grid: Grid,
    dtype: torch.dtype,
    *,
    by_stage: bool = False,
    by_expert_rank: bool = False,
) -> Iterator[tuple[TensorName, Tensor]]:
    """Stream the model, its adapters merged, to rank 0 as Hugging Face tensors. Collective: every rank must iterate to the end.

    Args:
        chunks: this rank's chunks, in data-parallel wrappers or not.
        model: the model.
        grid: this rank's grid.
        dtype: dtype of the exported tensors; routers' expert biases stay in float32.
        by_stage: gather each tensor only to the first rank of its pipeline stage.
        by_expert_rank: with `by_stage`, leave experts on the first rank of the stage that has them (`Grid.leads_experts`).

    Yields:
        On rank 0, or with `by_stage` on the first rank of each stage, or of each part of its experts: (Hugging Face name, whole tensor on
        the device), or for a layer's experts (their names, [experts, *tensor]), in memory of their own. On other ranks, nothing.
    """
    chunks = list(chunks)
    weights = [weight for weight in model.weights(head_of(chunks)) if not weight.alias]
    return export_weights(weights, MergedParameters(chunks, grid), grid, dtype, by_stage=by_stage, by_expert_rank=by_expert_rank)


def export_weights(
    weights: list[Weight],
    parameters: Mapping[str, Tensor],
    grid: Grid,
    dtype: torch.dtype,
    *,
    by_stage: bool = False,
    by_expert_rank: bool = False,
) -> Iterator[tuple[TensorName, Tensor]]:
    """Stream some weights as `export_stacks` does. Collective.

    Args:
        weights: what to stream, in this order.
        parameters: this rank's shards by name.
        grid: this rank's grid.
        dtype: as in `export_stacks`.
        by_stage: as in `export_stacks`.
        by_expert_rank: as in `export_stacks`.
    """
    assert by_stage or not by_expert_rank
    device = choose().device
    for batch in _plan(weights, grid, parameters, dtype, device):
        kind = torch.float32 if batch.weights[0].float32 else dtype
        apart = by_expert_rank and batch.ep > 1
        shards = _collected(batch, parameters, grid, kind, apart=apart)
        if apart:
            batch = _Batch(_own(batch, grid), 1, batch.owner)
        if not by_stage:
            shards = _handed_on(batch, shards, grid, kind, device)
        if shards is not None:
            yield from _named(batch, shards)


def save_hf(chunks: Iterable[Any], model: ModelDescription, grid: Grid, target: Path, pixels: tuple[int, int] | None = None) -> None:
    """Write the model as a Hugging Face directory in the parameters' dtype, complete or not at all. Collective.

    The first rank of each pipeline stage writes the stage's tensors, and must see the directory that rank 0 creates.

    config.json names the model's own head: transformers loads a critic or reward model with AutoModelForSequenceClassification, whichever
    directory it came from. transformers scores a sequence at the last token that is not config.json's pad_token_id: one token too early if
    that is also the end token. Without a pad_token_id it accepts only one sequence at a time.

    Args:
        chunks: this rank's chunks, in data-parallel wrappers or not.
        model: the model, whose directory config and tokenizer come from.
        grid: this rank's grid.
        target: the directory to write.
        pixels: as of `described`.

    Raises:
        ConfigError: `target` is not empty, or cannot be created.
        SaveError: a rank could not write. Both errors are raised on every rank.
    """
    chunks = list(chunks)
    dtype = next(iter(local_parameters(chunks, grid.ep_rank).values())).dtype
    head = model.family.heads[head_of(chunks)]
    with ExitStack() as stack:
        writer: CheckpointWriter | None = None
        told: list[Any] = [None, None]  # the directory, or why there is none
        if grid.rank == 0:
            if not head.known:
                log.warning("%s: transformers has no class %s: only megarl can load what is saved", target, head.architecture)
            labels, named = model.labels(head_of(chunks)), str(dtype).removeprefix("torch.")
            try:
                writer = stack.enter_context(CheckpointWriter(target, model.directory, named, labels, model.drop_images, pixels))
                told[0] = writer.folder
            except (ConfigError, OSError) as error:
                told[1] = str(error)
        dist.broadcast_object_list(told, group=grid.groups.control, group_src=0)
        if told[1] is not None:
            raise ConfigError(told[1])
        for shards, nbytes in _written(stacked(export_stacks(chunks, model, grid, dtype, by_stage=True), model), told[0], grid):
            if writer is not None:
                writer.include(shards, nbytes)
        _write_predictors(model, grid, writer, told[0])
        if head_of(chunks) == "lm":
            _write_peft(chunks, model, grid, dtype, told[0])


def _write_peft(chunks: list[Any], model: ModelDescription, grid: Grid, dtype: torch.dtype, folder: Path) -> None:
    """Write the model's adapters, if it has any, as a PEFT directory inside `folder`. Collective."""
    settings = settings_of(chunks)
    if settings is None:
        return
    parameters = list(adapted(model, settings).values())
    stream = export_weights(factor_weights(parameters), factor_parameters(chunks), grid, dtype)
    tensors = {
        name: tensor.cpu().clone(memory_format=torch.contiguous_format) for names, stack in stream for name, tensor in each(names, stack)
    }

    def write() -> None:
        targets = (target_of(weight, one) for weight, factors in parameters for one in factors)
        (folder / PEFT_FOLDER).mkdir()
        save_file(tensors, folder / PEFT_FOLDER / PEFT_WEIGHTS, metadata={"format": "pt"})
        (folder / PEFT_FOLDER / PEFT_CONFIG).write_text(json.dumps(peft_config(settings, str(model.directory), targets), indent=2) + "\n")

    _on_first(write, folder, grid)


def _write_predictors(model: ModelDescription, grid: Grid, writer: CheckpointWriter | None, folder: Path) -> None:
    """Add the multi-token prediction layers that belong to the model, if there are any. Collective."""
    predictors = model.predictors
    if predictors is None:
        return

    def write() -> None:
        assert writer is not None
        with (folder / KEPT).open("wb") as file:
            predictors.write(file)
        tensors = header(folder / KEPT)
        writer.include({KEPT: list(tensors)}, sum(info.size for info in tensors.values()))

    _on_first(write, folder, grid)


def _on_first(write: Callable[[], None], folder: Path, grid: Grid) -> None:
    """Let rank 0 write something into `folder`. Raises SaveError on every rank if it could not. Collective."""
    fault: list[str | None] = [None]
    if grid.rank == 0:
        try:
            write()
        except Exception as error:  # safetensors has its own type for a full disk
            fault = [f"rank 0: {type(error).__name__}: {one_line(str(error))}"]
    dist.broadcast_object_list(fault, group=grid.groups.control, group_src=0)
    if fault[0] is not None:
        raise SaveError(f"{folder}: {fault[0]}")


def print_of_base(chunks: Iterable[Any], model: ModelDescription, grid: Grid) -> str:
    """A fingerprint of all weights but adapters and a value head, the same on every layout: 16 hexadecimal digits. Collective.

    Args:
        chunks: this rank's chunks.
        model: the model.
        grid: this rank's grid.
    """
    chunks = list(chunks)
    weights = [
        weight
        for weight in model.weights(head_of(chunks))
        if not weight.alias and not (head_of(chunks) == "value" and weight.name == OUTPUT)
    ]
    parameters = local_parameters(chunks, grid.ep_rank)
    [dtype] = {parameter.dtype for name, parameter in parameters.items() if name not in {one.name for one in weights if one.float32}}
    prints, text = Fingerprinter(), [""]
    for names, tensors in export_weights(weights, parameters, grid, dtype):
        prints.add(names, tensors)
    if grid.rank == 0:
        rows = sorted((name, one.value, one.numel) for name, one in prints.digest().items())
        text = [hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]]
    dist.broadcast_object_list(text, group=grid.groups.control, group_src=0)
    return text[0]


def _written(stream: Iterator[tuple[TensorName, Tensor]], folder: Path, grid: Grid) -> list[tuple[dict[str, list[str]], int]]:
    """Write this rank's part of the stream. Returns each rank's files with the names of their tensors, and its bytes, in rank order."""
    writer, fault = ShardWriter(folder, f"stage-{grid.pp_rank}-"), None
    try:
        for names, tensors in stream:
            for name, tensor in each(names, tensors):
                writer.add(name, tensor)
        writer.close()
    except Exception as error:  # safetensors has its own type for a full disk
        fault = f"rank {grid.rank}: {type(error).__name__}: {one_line(str(error))}"
        deque(stream, maxlen=0)  # the other ranks keep gathering to its end
    told: list[Any] = [None] * grid.world
    dist.all_gather_object(told, (fault, writer.shards, writer.nbytes), group=grid.groups.control)
    faults = [one for one, _, _ in told if one is not None]
    if faults:
        raise SaveError(f"{folder}: {faults[0]}")
    return [(shards, nbytes) for _, shards, nbytes in told]


def _plan(weights: list[Weight], grid: Grid, parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> list[_Batch]:
    """The batches of the whole model, in the same order on all ranks, with the stages that hold them."""
    batches: list[_Batch] = []
    for _, group in groupby(weights, key=lambda weight: (weight.layer, weight.op if weight.expert is not None else weight.name)):
        batches += _batches(list(group), grid.layout.ep, dtype)
    owner = torch.tensor([grid.pp_rank if _held(batch, parameters) else -1 for batch in batches], device=device)
    dist.all_reduce(owner, op=dist.ReduceOp.MAX, group=grid.groups.pp)
    stages = owner.tolist()
    lost = [batch.weights[0].name for batch, stage in zip(batches, stages, strict=True) if stage < 0]
    assert not lost, f"no pipeline stage holds {lost}"
    return [_Batch(batch.weights, batch.ep, stage) for batch, stage in zip(batches, stages, strict=True)]


def _batches(weights: list[Weight], ep: int, dtype: torch.dtype) -> list[_Batch]:
    """One batch for a dense weight; for the experts of one layer and kind, slices of at most GATHER_BYTES."""
    if weights[0].expert is None:
        return [_Batch(weights, 1)]
    local = len(weights) // ep
    size = torch.Size(weights[0].op.packed_shape).numel() * dtype.itemsize
    step = max(1, GATHER_BYTES // (size * ep))
    return [
        _Batch([weight for rank in range(ep) for weight in weights[rank * local + start : rank * local + min(start + step, local)]], ep)
        for start in range(0, local, step)
    ]


def _held(batch: _Batch, parameters: Mapping[str, Tensor]) -> bool:
    """Whether this rank holds part of the batch, and therefore its stage all of it."""
    return any(weight.name in parameters for weight in batch.weights)


@torch.no_grad()
def _collected(batch: _Batch, parameters: Mapping[str, Tensor], grid: Grid, dtype: torch.dtype, *, apart: bool = False) -> Tensor | None:
    """Gather the batch's shards to its stage's first rank: [expert-parallel ranks, tensor-parallel ranks, weights of each, *shard].

    With `apart` each expert-parallel rank's stay with it: [1, ...]. Returns None on other ranks.
    """
    if batch.owner != grid.pp_rank or not _takes_part(batch.weights[0], grid):
        return None
    first, (ranks, _, _) = batch.weights[0], _sizes(batch, grid)
    shards = torch.stack([weight.op.chunk(parameters[weight.name].to(dtype), ranks) for weight in _own(batch, grid)])
    gathered = _gather(shards, (grid.groups.tp if first.expert is None else grid.groups.etp), ranks)
    return gathered if gathered is None else gathered[None] if apart else _gather(gathered, grid.groups.ep, batch.ep)


def _own(batch: _Batch, grid: Grid) -> list[Weight]:
    """The batch's weights that this expert-parallel rank has."""
    count = len(batch.weights) // batch.ep
    start = grid.ep_rank * count if batch.ep > 1 else 0
    return batch.weights[start : start + count]


def _handed_on(batch: _Batch, gathered: Tensor | None, grid: Grid, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Forward to rank 0 what `_collected` returned on the first rank of the batch's stage. Returns None on other ranks."""
    if batch.owner == 0:
        return gathered if grid.rank == 0 else None
    if gathered is not None:
        dist.send(gathered.view(torch.uint8), group=grid.groups.pp, group_dst=0)
    if grid.rank != 0:
        return None
    ranks, count, shape = _sizes(batch, grid)
    gathered = torch.empty((batch.ep, ranks, count, *shape), dtype=dtype, device=device)
    dist.recv(gathered.view(torch.uint8), group=grid.groups.pp, group_src=batch.owner)
    return gathered


def _sizes(batch: _Batch, grid: Grid) -> tuple[int, int, tuple[int, ...]]:
    """(tensor-parallel ranks that share each weight of the batch, weights on each expert-parallel rank, shape of a shard)."""
    op = batch.weights[0].op
    ranks = tensor_parallel(batch.weights[0], grid)[1] if op.axis is not None else 1
    return ranks, len(batch.weights) // batch.ep, op.shard_shape(ranks)


def _takes_part(weight: Weight, grid: Grid) -> bool:
    """Whether this rank is in the first replica of its stage, in the grid of the dense layers or of the experts."""
    if weight.expert is not None:
        return grid.groups.edp.rank() == 0
    return grid.dp_rank == 0 and grid.cp_rank == 0


def _gather(shard: Tensor, group: dist.ProcessGroup, ranks: int) -> Tensor | None:
    """Gather `shard` to [ranks, *shard] on the group's first rank; None on the others. With ranks = 1 it is the first rank's own tensor."""
    if ranks == 1:
        return shard[None] if group.rank() == 0 else None
    assert group.size() == ranks, f"{ranks} shards in a group of {group.size()}"
    if group.rank() != 0:
        dist.gather(shard.view(torch.uint8), group=group, group_dst=0)
        return None
    shards = shard.new_empty((ranks, *shard.shape))
    dist.gather(shard.view(torch.uint8), list(shards.view(torch.uint8).unbind(0)), group=group, group_dst=0)
    return shards


def _named(batch: _Batch, shards: Tensor) -> Iterator[tuple[TensorName, Tensor]]:
    """Join `_collected`'s [expert-parallel ranks, tensor-parallel ranks, weights of each, *shard] into the batch's Hugging Face tensors."""
    op = batch.weights[0].op
    if batch.weights[0].expert is None:
        yield from zip(batch.weights[0].hf, op.join(shards[0, :, 0].unbind(0)), strict=True)
        return
    whole = torch.vmap(torch.vmap(lambda pieces: op.join(pieces.unbind(0)), in_dims=1))(shards)  # all experts at once
    for index, tensors in enumerate(whole):
        yield [weight.hf[index] for weight in batch.weights], tensors.flatten(0, 1)
