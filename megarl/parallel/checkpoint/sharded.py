"""Converts a model and its optimizer to Megatron's sharded tensors and back: the content of a distributed checkpoint, for any layout.

The keys and shapes on disk are those of Megatron's `fully_reshardable` optimizer format: each parameter's fp32 main copy and two moments in
the parameter's own shape. Upstream gathers the whole optimizer on every data-parallel rank to make them (distrib_optimizer.py:1690), and
loads all of it everywhere. Here each rank saves the parameters that begin in its own slice of the flat buffers, with the missing ends sent
by its neighbours, and loads those that its slice overlaps: memory, traffic and writing are divided by the data-parallel size.

This also avoids bugs of upstream 0.19.2 (distrib_optimizer.py): `load_state_dict` gives all parameters one step tensor (:1032),
`_set_main_param_and_optimizer_states` asks the file for a moment named step (:1225), `state_dict` cannot be called before the first step
(:839), and if a buffer has several buckets, as with tied embeddings, parameters are cut out at the wrong offsets (:1403 leaves out the
buckets' padding, :1791 counts it).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megarl.models.te_names import to_te
from megarl.parallel.grid import Grid
from megarl.parallel.optimizer import Trainable
from megarl.parallel.slices import BufferedParameter, buffered
from megarl.parallel.weights import weight_buffers

_EXTRA = "_extra_state"  # Transformer Engine's fp8 scales: pickled by Megatron, empty in bfloat16, left out

Sharded = dict[str, Any]  # nested; its leaves are ShardedTensor or ShardedTensorFactory


def model_state(chunks: Sequence[Any], grid: Grid) -> Sharded:
    """The weights of this rank's chunks (in data-parallel wrappers or not), under the same names whichever layers they are built from.

    Of a model with adapters, only these and a value head: the other weights never change. The tensors are the parameters themselves.
    """
    metadata = {"dp_cp_group": grid.groups.dp_cp}
    state: Sharded = {}
    for number, chunk in enumerate(chunks):
        if hasattr(_bare(chunk), "adapters"):
            state[f"model{number}"] = _trained_beside(_bare(chunk), metadata)
            continue
        sharded = _bare(chunk).sharded_state_dict(metadata=metadata)
        objects, tensors = extract_matching_values(sharded, lambda leaf: isinstance(leaf, ShardedObject))
        # For the experts of a grouped layer, the names end with a number, and the keys do not.
        assert all(leaf.key.endswith(_EXTRA) for leaf in _leaves(objects)), f"not tensors: {sorted(objects)}"
        renamed = to_te({leaf.key for leaf in _leaves(tensors)})
        for leaf in _leaves(tensors):
            leaf.key = renamed[leaf.key]
        state[f"model{number}"] = tensors
        covered = _by_parameter(tensors)
        lost = [name for name, tensor in (*chunk.named_parameters(), *weight_buffers(chunk)) if tensor not in covered]
        assert not lost, f"in no checkpoint: {lost}"
    return state


def _trained_beside(chunk: Any, metadata: dict[str, Any]) -> Sharded:
    """The adapters of a chunk, and its value head."""
    state: Sharded = chunk.adapters.sharded_state_dict("", (), metadata)
    if chunk.post_process and chunk.head == "value":
        state |= chunk.output_layer.sharded_state_dict("output_layer.", (), metadata)
    covered = _by_parameter(state)
    lost = [name for name, parameter in chunk.named_parameters() if parameter.requires_grad and parameter not in covered]
    assert not lost, f"in no checkpoint: {lost}"
    return state


def share_writing(state: Sharded, grid: Grid) -> None:
    """Spread the writing of weights over the data-parallel replicas that all hold them, round-robin, by changing `state`."""
    for number, leaf in enumerate(_leaves(state)):
        replicas = grid.groups.edp.size() if ".experts." in leaf.key else grid.groups.dp_cp.size()
        *others, replica = leaf.replica_id
        leaf.replica_id = (*others, (replica - number) % replicas)


def optimizer_state(trainable: Trainable, model: Sharded) -> Sharded:
    """The whole main copies and moments of the parameters that begin in this rank's slices. Collective within data-parallel groups.

    `model` is this rank's `model_state`. Before the first step the moments are zero.
    """
    sharded = _by_parameter(model)
    state: Sharded = {}
    for one in _buffered(trainable):
        whole = _assembled(one)
        if whole is not None:
            leaf = sharded[one.parameter]
            state[str(len(state))] = {name: _like(leaf, name, tensor) for name, tensor in zip(one.states, whole, strict=True)}
    return state


def empty_optimizer_state(trainable: Trainable, model: Sharded) -> Sharded:
    """Tensors to load into: those of `optimizer_state`, for every parameter that this rank's slices overlap.

    For a parameter that lies entirely in the slices, they are the optimizer's own.
    """
    start_optimizer(trainable)
    sharded = _by_parameter(model)
    state: Sharded = {}
    for number, one in enumerate(_held(trainable)):
        shape = one.parameter.shape
        places = one.local() if one.whole else [torch.empty(shape.numel(), dtype=torch.float32) for _ in one.states]
        state[str(number)] = {
            name: _like(sharded[one.parameter], name, place.view(shape)) for name, place in zip(one.states, places, strict=True)
        }
    return state


@torch.no_grad()
def put_optimizer(trainable: Trainable, state: Sharded, adam_step: int) -> None:
    """Put loaded states into the optimizer.

    Args:
        trainable: the model with its optimizer.
        state: a loaded `empty_optimizer_state`: main copies and moments.
        adam_step: Adam's step count.
    """
    for number, one in enumerate(_held(trainable)):
        if not one.whole:
            for name, mine in zip(one.states, one.local(), strict=True):
                mine.copy_(state[str(number)][name].data.flatten()[one.begin : one.end])
    finish_optimizer(trainable, adam_step)


def tensors(state: Sharded) -> list[Tensor]:
    """The tensors of a `model_state`, in its order."""
    return [leaf.data.detach() for leaf in _leaves(state)]


def local_optimizer_state(trainable: Trainable) -> list[Tensor]:
    """This rank's own pieces of main copies and moments; before the first step the moments are throwaway zeros, see `start_optimizer`."""
    return [tensor for one in _held(trainable) for tensor in one.local()]


def start_optimizer(trainable: Trainable) -> None:
    """Give the optimizer its moments, if it has none yet, by a step on zero gradients. What that changes must be overwritten afterwards.

    It uses the gradient buffers, whereas Megatron's own step of this kind (distrib_optimizer.py:1422) takes as much memory again.
    """
    parts = [part for part in _optimizers(trainable) if not part.optimizer.state]
    if parts:
        trainable.zero_grad()
    for part in parts:
        part._copy_model_grads_to_main_grads()
        part.optimizer.step()
        part.optimizer.zero_grad()


def finish_optimizer(trainable: Trainable, adam_step: int) -> None:
    """Set Adam's step count, and the main weights if an offloaded optimizer has copies of them, after states were put in place."""
    for one in _held(trainable):
        one.main.detach().copy_(one.local()[0])
    for part in _optimizers(trainable):
        for entry in part.optimizer.state.values():
            if "step" in entry:  # torch: a tensor for each parameter
                entry["step"].fill_(adam_step)
        for group in _counting(part):
            if "step" in group:  # Transformer Engine and apex
                group["step"] = adam_step


def adam_step(trainable: Trainable) -> int:
    """The number of steps that Adam has taken, by its own count."""
    steps: set[int] = set()
    for part in _optimizers(trainable):
        steps |= {int(entry["step"]) for entry in part.optimizer.state.values() if "step" in entry}
        steps |= {int(group["step"]) for group in _counting(part) if group["params"] and "step" in group}
    assert len(steps) <= 1, f"parameters disagree on Adam's step: {sorted(steps)}"
    return max(steps, default=0)


def _buffered(trainable: Trainable) -> Iterator[BufferedParameter]:
    """Every parameter of the buffers that this rank shares, in the same order on all ranks that share them."""
    for part in _optimizers(trainable):
        yield from buffered(part)


def _held(trainable: Trainable) -> list[BufferedParameter]:
    """The buffered parameters of which this rank's slices hold a piece."""
    return [one for one in _buffered(trainable) if one.held]


def _optimizers(trainable: Trainable) -> list[Any]:
    """The optimizers of dense and of expert parameters that this rank has."""
    return [part for part in trainable.optimizer.chained_optimizers if not part.is_stub_optimizer]


def _counting(part: Any) -> list[dict[str, Any]]:
    """The parameter groups in which an optimizer counts its steps. A partly offloaded one consists of several optimizers, which count."""
    return [group for one in getattr(part.optimizer, "sub_optimizers", [part.optimizer]) for group in one.param_groups]


def _assembled(one: BufferedParameter) -> list[Tensor] | None:
    """Gather the whole parameter's states on the first of its owners. Returns None elsewhere."""
    if not one.held:
        return None
    shape = one.parameter.shape
    if one.whole:
        return [tensor.view(shape) for tensor in one.local()]  # what an offloaded optimizer holds stays in host memory
    whole_SN = one.gather(torch.stack([tensor.to(one.main.device) for tensor in one.local()]))
    return None if whole_SN is None else [tensor.view(shape) for tensor in whole_SN]


def _like(leaf: ShardedTensor | ShardedTensorFactory, name: str, data: Tensor) -> ShardedTensor | ShardedTensorFactory:
    """A state of the parameter `leaf`, sharded like it; among the data-parallel ranks, only this one has it."""
    *others, _ = leaf.replica_id
    changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{leaf.key}", "data": data, "replica_id": (*others, 0)}
    if isinstance(leaf, ShardedTensor):
        changes["dtype"] = data.dtype
    return replace(leaf, **changes)


def _by_parameter(model: Sharded) -> Mapping[Tensor, Any]:
    return {leaf.data: leaf for leaf in _leaves(model)}


def _leaves(state: Any) -> Iterator[Any]:
    for value in state.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value


def _bare(chunk: Any) -> Any:
    """The chunk without its data-parallel wrapper."""
    return getattr(chunk, "module", chunk)
