"""Process groups over gloo that use few threads.

torch gives every group a device of its own (distributed_c10d.py:2169), and gloo gives each device a thread that wakes up a hundred times a
second even when idle (gloo's transport/tcp/loop.cc); a grid has 18 groups, an engine 9.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo, Store

from megarl.upstream.expect import expect


def group(store: Store, rank: int, size: int, timeout: timedelta, interface: str) -> ProcessGroupGloo:
    """Join a process group, and return this process's member. Blocks until all members have joined.

    Args:
        store: the store at which the members meet.
        rank: this process's rank.
        size: number of members.
        timeout: time limit for joining, and for each collective.
        interface: the network interface to listen on.
    """
    return ProcessGroupGloo(store, rank, size, _options(ProcessGroupGloo.create_device(interface=interface), timeout))


@contextmanager
def one_device() -> Iterator[None]:
    """Make the gloo groups that torch creates in the block share one device, on torch's own choice of interface (GLOO_SOCKET_IFNAME)."""
    look_at_torch()

    @cache
    def device(process: int) -> Any:  # a separate one for each process that is forked in the block
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if not interfaces:
            return ProcessGroupGloo.create_default_device()  # this does not read the variable
        return ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])

    class SharingGroup(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(store, rank, size, _options(device(os.getpid()), timeout))

    c10d.ProcessGroupGloo = SharingGroup  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


@cache
def look_at_torch() -> None:
    """Raise RuntimeError if torch no longer creates its groups in the expected way. The first call reads a long file."""
    expect(c10d._new_process_group_helper, "backend_class = ProcessGroupGloo(", "backend_prefix_store,", "timeout=timeout,")


def _options(device: Any, timeout: timedelta) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [device], timeout
    return options
