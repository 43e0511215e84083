"""Faults of megatron-core 0.16.1 that show on every hardware, mended in one place; those of the CPU alone stand in `cpu/patches.py`.

Each names the upstream file and line and first checks that the faulty lines are still there.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def expect(function: Any, *lines: str) -> None:
    """Raises RuntimeError unless the source of `function` holds the given lines, in this order."""
    source, place = inspect.getsource(function), 0
    for line in lines:
        place = source.find(line, place)
        if place < 0:
            name = f"{function.__module__}.{function.__qualname__}"
            raise RuntimeError(f"{name} of megatron-core no longer holds {line!r}: megarl's patch for it must be reviewed")


def apply() -> None:
    """Mend the importable megatron.core, on any hardware."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    _shape_exchange(P2PCommunicator)


def _shape_exchange(communicator: Any) -> None:
    """p2p_communication.py:216-237 posts sends and receives in the order previous, next.

    With two pipeline stages both neighbours are one process, and what it sends to its previous stage arrives at our next: when both
    directions are in flight (the interleaved schedule) the two shapes come out swapped. Receives must stand in the peer's order.
    """
    expect(communicator._communicate_shapes, "ops.append(send_prev_op)", "ops.append(recv_prev_op)", "ops.append(recv_next_op)")

    def communicate_shapes(
        self: Any, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        from megarl.parallel.backend import choose

        backend = choose()
        from_prev, from_next = torch.zeros(2, 3, dtype=torch.int64, device=backend.device)
        ops = []

        def post(way: Any, tensor: Tensor, peer: int) -> None:
            ops.append(dist.P2POp(way, tensor, peer, self.pp_group))

        if tensor_send_prev is not None:
            post(dist.isend, torch.tensor(tensor_send_prev.shape, device=backend.device), self.prev_rank)
        if recv_next:
            post(dist.irecv, from_next, self.next_rank)
        if tensor_send_next is not None:
            post(dist.isend, torch.tensor(tensor_send_next.shape, device=backend.device), self.next_rank)
        if recv_prev:
            post(dist.irecv, from_prev, self.prev_rank)
        for request in dist.batch_isend_irecv(ops) if ops else []:
            request.wait()
        backend.synchronize()  # as upstream does, against a race of batch_isend_irecv
        return from_prev.tolist(), from_next.tolist()

    communicator._communicate_shapes = communicate_shapes
