"""Low-rank adapters beside the frozen linear layers of a model: y = W x + alpha / rank B A x on tensor- and expert-parallel layers.

Of a column-parallel layer, B is split by rows as W is, and every rank has all of A; of a row-parallel one, A is split by columns, and every
rank has all of B. What every rank has sees only a part of what its gradient is the sum over: with sequence parallelism its own tokens'
(A of a column-parallel layer is applied before the tokens are gathered, B of a row-parallel one after the sum is scattered), whose
gradients Megatron sums as those of norms; in an expert its own shard's, summed as they arise.

Axes: S tokens of this rank (with sequence parallelism), I inputs, O outputs, of this rank's shard; R the rank, P the adapted matrices of a
parameter (q, k, v; gate, up).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.config import LoraSettings
from megarl.errors import ConfigError
from megarl.models.adapters import PEFT_CONFIG, PEFT_WEIGHTS, Factors, PackedRows, adapted, check_peft_config, factor_weights, with_columns
from megarl.models.description import ModelDescription
from megarl.models.hf import json_object
from megarl.models.weight_map import Weight, is_router
from megarl.parallel.grid import Grid
from megarl.parallel.weights import canonical_names, head_of, local_parameters, tensor_parallel, unwrap
from megarl.text.display import one_line

NAME = "adapters"  # the attribute of a chunk
# Random states of dropout in Megatron's tracker, which recomputation and checkpoints restore. The shards of an expert's column-parallel
# layer have the same inputs; any others have tokens or columns of their own.
OWN, SHARED = "adapters", "adapters of an expert's shards"


class Adapter(torch.nn.Module):
    """The adapter of one of Megatron's parameters on this rank.

    Args:
        weight: the parameter that it adapts.
        factors: of each of its adapted matrices.
        settings: the section `model.lora`.
        base: the parameter's shard; the factors get its dtype and device.
        grid: this rank's grid.
    """

    def __init__(self, weight: Weight, factors: list[Factors], settings: LoraSettings, base: Tensor, grid: Grid) -> None:
        super().__init__()
        self.weight, self.factors, self.scale, self.dropout = weight, factors, settings.alpha / settings.rank, settings.dropout
        self.expert, self.dim = weight.expert is not None, weight.op.dim
        self.group = grid.groups.etp if self.expert else grid.groups.tp
        _, self.ranks = tensor_parallel(weight, grid)

        def made(one: Weight) -> torch.nn.Parameter:
            parameter = torch.nn.Parameter(torch.empty(one.op.shard_shape(self.ranks), dtype=base.dtype, device=base.device))
            split = one.op.axis is not None or self.ranks == 1
            parameter.tensor_model_parallel = split  # type: ignore[attr-defined]  # the norm of the gradient has what is not split only once
            parameter.allreduce = not self.expert  # type: ignore[attr-defined]  # see `build.build_chunks`
            parameter.sequence_parallel = not split and not self.expert  # type: ignore[attr-defined]
            return parameter

        self.a = torch.nn.ParameterList([made(one.a) for one in factors])
        self.b = torch.nn.ParameterList([made(one.b) for one in factors])

    def parts(self) -> Iterator[tuple[Weight, torch.nn.Parameter]]:
        """Its factors, each with this rank's shard."""
        for one, a, b in zip(self.factors, self.a, self.b, strict=True):
            yield from ((one.a, a), (one.b, b))

    def forward(self, x_SI: Tensor) -> Tensor:
        """What the adapter adds to the layer's output; in an expert this shard's share of it, like the layer's own."""
        a, b = (one.to(x_SI.dtype) for one in (torch.cat(list(self.a)), self._outer(list(self.b))))
        if self.expert and self.ranks > 1:  # all of its shards have the same tokens: the gradient of what they share is summed here
            a, b = (
                (copy_to_tensor_model_parallel_region(a, self.group), b)
                if self.dim == 0
                else (a, copy_to_tensor_model_parallel_region(b, self.group))
            )
        inner = F.linear(self.dropped(x_SI), a)
        if not self.expert and self.ranks > 1 and self.dim == 0:
            inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=self.group)
        elif not self.expert and self.ranks > 1 and self.dim == 1:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        return F.linear(inner, b) * self.scale

    def dropped(self, x_SI: Tensor) -> Tensor:
        """The input of an update with some of its elements zero, chosen alike on ranks that have the same input; else as it is."""
        if not self.training or not self.dropout:
            return x_SI
        with get_cuda_rng_tracker().fork(SHARED if self.expert and self.dim == 0 else OWN):
            return F.dropout(x_SI, self.dropout)

    @torch.no_grad()
    def merged(self, base: Tensor) -> Tensor:
        """The parameter's shard with the adapter merged into it, in float32."""
        return base.float() + self.scale * (self._outer([b.float() for b in self.b]) @ torch.cat([a.float() for a in self.a]))

    def _outer(self, factors: list[Tensor]) -> Tensor:
        """The B of all adapted matrices in the order of the parameter's rows [O, P R]: each row has its own matrix's R columns, else 0."""
        op, first = self.weight.op, self.factors[0].b.op
        if len(op.shapes) == 1:
            return first.rows.parameter(factors[0]) if isinstance(first, PackedRows) else factors[0]
        rank, width = factors[0].shape[-1], sum(one.shape[-1] for one in factors)
        of = {one.index: number for number, one in enumerate(self.factors)}
        blocks = []
        for index, (rows, _) in enumerate(op.shapes):
            number = of.get(index)
            if number is None:
                blocks.append(factors[0].new_zeros(rows // self.ranks, width))
            else:
                [rows_OR] = self.factors[number].b.op.unpack(factors[number])
                blocks.append(F.pad(rows_OR, (number * rank, width - (number + 1) * rank)))
        narrow = with_columns(op, width)
        return narrow.parameter(narrow.pack(blocks))


class Adapters(torch.nn.Module):
    """The adapters of one model chunk. `active` turns all of them on and off.

    Args:
        adapters: by the canonical name of the parameter that each adapts.
        settings: the section `model.lora`.
        grid: this rank's grid.
    """

    def __init__(self, adapters: Mapping[str, Adapter], settings: LoraSettings, grid: Grid) -> None:
        super().__init__()
        self.of, self.settings, self.active, self._grid = dict(adapters), settings, True, grid
        self.each = torch.nn.ModuleList(adapters.values())

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any]) -> dict[str, Any]:
        """The factors as sharded tensors of a distributed checkpoint, under the names of the Hugging Face matrices that they adapt.

        Args:
            prefix: prefix of the chunk's names.
            sharded_offsets: none: the names say layer and expert.
            metadata: Megatron's metadata, which says which ranks are replicas.
        """
        assert not sharded_offsets
        state = {}
        for adapter in self.of.values():
            group = self._grid.groups.edp if adapter.expert else metadata["dp_cp_group"]
            for weight, parameter in adapter.parts():
                rank, ranks = tensor_parallel(weight, self._grid)
                split = weight.op.axis is not None
                offsets = [(weight.op.axis, rank, ranks)] if split else []
                replica = (0, 0 if split else rank, group.rank())
                state[f"{prefix}{weight.name}"] = ShardedTensor.from_rank_offsets(weight.name, parameter, *offsets, replica_id=replica)
        return state


def put_adapters(chunks: Iterable[Any], model: ModelDescription, settings: LoraSettings, grid: Grid) -> None:
    """Put adapters beside the linear layers of this rank's frozen chunks: A random, B zero. A value head is trained besides.

    Call it once the weights are loaded, before `make_trainable`. A is uniform in +-1 / sqrt(in), as PEFT's, the same on every layout.

    Args:
        chunks: from `build.build_chunks`, without grad, `adapted`.
        model: the model.
        settings: the section `model.lora`.
        grid: this rank's grid.

    Raises:
        ConfigError: see `adapters.adapted`.
    """
    chunks = list(chunks)
    parameters = adapted(model, settings, head_of(chunks))
    seed = _seed()
    if settings.dropout:
        _put_random_states(seed, grid, next(chunks[0].parameters()).device)
    for chunk in map(unwrap, chunks):
        own, layers, by_name = dict(chunk.named_parameters()), dict[str, list[Adapter]](), dict[str, Adapter]()
        for name, known in canonical_names(chunk, own, grid.ep_rank).items():
            if known in parameters:
                by_name[known] = Adapter(*parameters[known], settings, own[name], grid)
                layers.setdefault(name.rpartition(".")[0], []).append(by_name[known])
        chunk.add_module(NAME, Adapters(by_name, settings, grid))
        for name, adapters in layers.items():
            layer = chunk.get_submodule(name)
            assert not hasattr(layer, "layer_norm_weight"), f"{name} normalises its input; see `build_chunks`"
            if is_router(adapters[0].weight.name):
                layer.gating = _scoring(layer.gating, adapters[0], chunk.adapters)
            else:
                layer.register_forward_hook(_adding(adapters, chunk.adapters))
        for adapter in by_name.values():
            _initialise(adapter, seed, grid)
        if chunk.post_process and chunk.head == "value":
            chunk.output_layer.requires_grad_(True)
        if settings.init is not None:
            _read_peft(by_name.values(), parameters.values(), settings, grid)
        if chunk.pre_process:  # recomputation skips the gradients of a layer without an input that has one
            chunk.embedding.register_forward_hook(_with_gradient)


@contextmanager
def without_adapters(chunks: Iterable[Any]) -> Iterator[None]:
    """Within it, the chunks compute what the base model does, bit for bit."""
    adapters = [unwrap(chunk).adapters for chunk in chunks]
    for one in adapters:
        one.active = False
    try:
        yield
    finally:
        for one in adapters:
            one.active = True


def adapters_of(chunks: Iterable[Any]) -> dict[str, Adapter]:
    """This rank's adapters by the canonical name of the parameter that each adapts; none if the model has none."""
    by_name: dict[str, Adapter] = {}
    for chunk in map(unwrap, chunks):
        by_name |= chunk.adapters.of if hasattr(chunk, NAME) else {}
    return by_name


def settings_of(chunks: Iterable[Any]) -> LoraSettings | None:
    """The section `model.lora` of the model's adapters; None if it has none."""
    adapters = [getattr(unwrap(chunk), NAME, None) for chunk in chunks]
    return None if adapters[0] is None else adapters[0].settings


def factor_parameters(chunks: Iterable[Any]) -> dict[str, Tensor]:
    """This rank's shards of the factors, by their names."""
    return {weight.name: parameter for adapter in adapters_of(chunks).values() for weight, parameter in adapter.parts()}


class MergedParameters(Mapping[str, Tensor]):
    """This rank's parameters by canonical name, each with its adapter merged into it when it is asked for: in float32, if it has one.

    Args:
        chunks: this rank's chunks.
        grid: this rank's grid.
    """

    def __init__(self, chunks: Iterable[Any], grid: Grid) -> None:
        chunks = list(chunks)
        self._base, self._adapters = local_parameters(chunks, grid.ep_rank), adapters_of(chunks)

    def __getitem__(self, name: str) -> Tensor:
        base = self._base[name]
        return self._adapters[name].merged(base) if name in self._adapters else base

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _adding(adapters: list[Adapter], switch: Adapters) -> Any:
    """A forward hook of the layer of these adapters: one, or one for each expert of a layer that is given their numbers of tokens."""
    adapters = sorted(adapters, key=lambda adapter: adapter.weight.expert or 0)

    def add(_: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None] | None:
        if not switch.active:
            return None
        (x_SI, *counts), (result, bias) = inputs, output
        parts = x_SI.split(*counts) if counts else (x_SI,)
        added = [adapter(part) for adapter, part in zip(adapters, parts, strict=True)]
        return result + (torch.cat(added) if counts else added[0]), bias

    return add


def _scoring(gating: Callable[[Tensor], Tensor], adapter: Adapter, switch: Adapters) -> Callable[[Tensor], Tensor]:
    """A router's scores with its adapter, in the dtype of the scores."""

    def scores(x_SI: Tensor) -> Tensor:
        score_SE = gating(x_SI)
        return score_SE + adapter(x_SI.to(score_SE.dtype)) if switch.active else score_SE

    return scores


def _with_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


@torch.no_grad()
def _initialise(adapter: Adapter, seed: int, grid: Grid) -> None:
    for weight, parameter in adapter.parts():
        if weight.name.endswith("lora_B"):
            parameter.zero_()
            continue
        generator = torch.Generator().manual_seed(_drawn(seed, weight.name))
        whole = torch.rand(weight.op.packed_shape, generator=generator).mul_(2).sub_(1).div_(weight.op.packed_shape[1] ** 0.5)
        put_factor(weight, parameter, whole, grid)


@torch.no_grad()
def put_factor(weight: Weight, parameter: Tensor, whole: Tensor, grid: Grid) -> None:
    """Copy this rank's part of a whole factor into its shard.

    Args:
        weight: the factor.
        parameter: its shard on this rank.
        whole: the factor's numbers.
        grid: this rank's grid.
    """
    rank, ranks = tensor_parallel(weight, grid)
    packed, axis = weight.op.pack([whole]), weight.op.axis
    parameter.copy_(packed if axis is None else packed.chunk(ranks, axis)[rank])


def _read_peft(adapters: Iterable[Adapter], parameters: Iterable[tuple[Weight, list[Factors]]], settings: LoraSettings, grid: Grid) -> None:
    """Fill adapters from a PEFT directory, which must hold exactly the factors of all `parameters`."""
    path = settings.init
    assert path is not None
    check_peft_config(json_object(path / PEFT_CONFIG), settings, str(path))
    file = path / PEFT_WEIGHTS
    try:
        with safe_open(file, framework="pt") as stored:
            wanted, given = {weight.hf[0] for weight in factor_weights(parameters)}, set(stored.keys())
            for names, where in ((wanted - given, "is not in"), (given - wanted, "is none of model.lora's targets, and is in")):
                if names:
                    raise ConfigError(f"model.lora.init: {min(names)} {where} {file} ({len(names)} such tensors)")
            for weight, parameter in (part for adapter in adapters for part in adapter.parts()):
                whole = stored.get_tensor(weight.hf[0])
                if tuple(whole.shape) != weight.op.shapes[0]:
                    raise ConfigError(f"model.lora.init: {file}: {weight.hf[0]} is {list(whole.shape)}, not {list(weight.op.shapes[0])}")
                put_factor(weight, parameter, whole, grid)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.lora.init: {file}: {one_line(str(error))}") from None


def _put_random_states(seed: int, grid: Grid, device: torch.device) -> None:
    states = get_cuda_rng_tracker().get_states()
    for name, rank in ((OWN, grid.rank), (SHARED, min(dist.get_process_group_ranks(grid.groups.etp)))):
        states[name] = torch.Generator(device).manual_seed(_drawn(seed, f"{name} {rank}")).get_state()
    get_cuda_rng_tracker().set_states(states)


def _drawn(seed: int, name: str) -> int:
    """A seed for this name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def _seed() -> int:
    """A number drawn from the grid's seed, the same on every rank and layout; the random state is read, and not advanced."""
    state = get_cuda_rng_tracker().get_states()[get_data_parallel_rng_tracker_name()]
    return int.from_bytes(hashlib.sha256(state.cpu().numpy().tobytes()).digest()[:7], "big")
