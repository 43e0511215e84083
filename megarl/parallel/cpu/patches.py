"""Patches for the bugs of megatron-core 0.19.2 that keep it from running on gloo and the CPU.

Each patch names the upstream file and line and first checks that the faulty lines are still there: if upstream has changed, the program
stops here instead of computing a wrong gradient. Nothing in this file is used if CUDA is present.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.cpu.groups import look_at_upstream
from megarl.upstream.expect import expect


def apply() -> None:
    """Patch megatron.core. Raises RuntimeError if upstream's source is no longer as expected."""
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    _rng_state(random)
    _split_sizes(moe_utils, token_dispatcher)
    _uneven_collectives(mappings)
    _collectives_of_one(buffers)
    look_at_upstream()


def _rng_state(random: Any) -> None:
    """random.py:104,135 bypass torch.cuda's Python names. Unpatched, setting a state only queues a call that never runs."""
    expect(random._get_cuda_rng_state, "torch.cuda.random.get_rng_state(device=device)")
    expect(random._set_cuda_rng_state, "_lazy_call(cb)")

    def get_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> Tensor:
        return torch.get_rng_state()

    def set_state(new_state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state


def _split_sizes(moe_utils: Any, token_dispatcher: Any) -> None:
    """moe_utils.py:1169 converts split sizes to numbers only if they are on a GPU; torch's all_to_all_single takes no tensors as sizes."""
    expect(moe_utils.maybe_move_tensor_to_cpu, "if torch.is_tensor(tensor) and tensor.is_cuda:")

    def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = as_numbers


def _uneven_collectives(mappings: Any) -> None:
    """mappings.py:154,197 pass uneven splits to all_gather and reduce_scatter (ETP > 1 with EP > 1); gloo's require equal sizes."""
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    expect(gather, "torch.distributed.all_gather(output_tensor_list, input_, group=group)")
    expect(scatter, "torch.distributed.reduce_scatter(output, input_tensor_list, group=group)")

    def gather_uneven(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_uneven(input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        rows = sizes[group.rank()]
        parts = input_.new_empty(group.size() * rows, *input_.shape[1:])
        dist.all_to_all_single(parts, input_.contiguous(), [rows] * group.size(), sizes, group=group)
        return parts.view(group.size(), rows, *input_.shape[1:]).sum(0)

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_uneven, scatter_uneven


def _collectives_of_one(buffers: Any) -> None:
    """param_and_grad_buffer.py:504,702 reduce gradients and gather parameters even in a group of one rank, which has them already.

    gloo first copies all of them into newly allocated memory: an eighth of an update.
    """
    groups = buffers._ParamAndGradBucketGroup
    expect(groups.start_param_sync, "with _coalescing_manager(", "dist_all_gather_func(", "group=self.")
    expect(groups.start_grad_sync, "with stream_context, _coalescing_manager(", "dist_reduce_scatter_func(", "group=communication_group")
    coalesce = buffers._coalescing_manager

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors, group, **options: None if group.size() == 1 else collective(*tensors, group=group, **options)

    @contextmanager
    def coalesced(group: Any, async_ops: bool) -> Iterator[Any]:
        if group.size() == 1:
            yield SimpleNamespace(wait=lambda: None)
            return
        with coalesce(group, async_ops=async_ops) as work:
            yield work

    buffers._coalescing_manager = coalesced
    buffers.dist_all_gather_func = unless_alone(buffers.dist_all_gather_func)
    buffers.dist_reduce_scatter_func = unless_alone(buffers.dist_reduce_scatter_func)
