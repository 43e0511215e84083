"""Fewer process groups on the CPU, whose every one costs sockets and threads of gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megarl.patching import expect
from megarl.sync.gloo import look_at_torch, one_device


@contextmanager
def few_groups() -> Iterator[None]:
    """The groups that torch and Megatron make in the block share gloo's device, and Megatron's groups of the same ranks are one.

    Megatron makes some 18 for a rank, one for each of its names, of which the most have the same ranks where few kinds of parallelism are
    used. Over NCCL they run side by side; over gloo each only adds sockets to every other rank, and the time to connect them.
    """
    from megatron.core import parallel_state

    create, made = parallel_state.create_group, dict[tuple[int, ...], Any]()

    def create_once(ranks: list[int], **options: Any) -> Any:
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        key = tuple(sorted(ranks))
        if key not in made:
            made[key] = create(ranks, **options)
        return made[key]

    parallel_state.create_group = create_once
    try:
        with one_device():
            yield
    finally:
        parallel_state.create_group = create


def look_at_upstream() -> None:
    """Raises RuntimeError where torch or Megatron makes its groups in another way by now."""
    from megatron.core import parallel_state

    look_at_torch()
    expect(parallel_state.create_group, "group = torch.distributed.new_group(**kwargs)")
