"""Reduces the number of process groups on the CPU, where each one costs gloo sockets and threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megarl.sync.gloo import look_at_torch, one_device
from megarl.upstream.expect import expect


@contextmanager
def few_groups() -> Iterator[None]:
    """Make the groups that torch and Megatron create in the block share one gloo device, and Megatron's groups of the same ranks one group.

    Megatron creates some 18 groups per rank, one for each of its names, and most have the same ranks if few kinds of parallelism are used.
    Over NCCL they run side by side; over gloo each only adds sockets to every other rank, and the time to connect them.
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
    """Raise RuntimeError if torch or Megatron no longer creates its groups in the expected way."""
    from megatron.core import parallel_state

    look_at_torch()
    expect(parallel_state.create_group, "group = torch.distributed.new_group(**kwargs)")
