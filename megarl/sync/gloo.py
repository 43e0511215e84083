"""Process groups over gloo whose threads are few.

torch gives every group a device of its own (distributed_c10d.py:2169), and gloo each device a thread that wakes up a hundred times a second
whether there is something to do or not (gloo's transport/tcp/loop.cc): a grid has 18 groups, an engine 9.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo, Store

from megarl.patching import expect


def group(store: Store, rank: int, size: int, timeout: timedelta, interface: str) -> ProcessGroupGloo:
    """This process's member of a group; blocks until all members have joined.

    Args:
        store: that they meet at.
        rank: of this one.
        size: how many they are.
        timeout: of joining, and of each collective.
        interface: that it listens on.
    """
    return ProcessGroupGloo(store, rank, size, _options(ProcessGroupGloo.create_device(interface=interface), timeout))


@contextmanager
def one_device() -> Iterator[None]:
    """The groups over gloo that torch makes in the block share a device, on the interface that GLOO_SOCKET_IFNAME names, as torch's do."""
    look_at_torch()

    @cache
    def device(process: int) -> Any:  # of each process that was forked in the block its own
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
        if not interfaces:
            return ProcessGroupGloo.create_default_device()  # which does not read the variable
        return ProcessGroupGloo.create_device(interface=interfaces.split(",")[0])

    class Member(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(store, rank, size, _options(device(os.getpid()), timeout))

    c10d.ProcessGroupGloo = Member  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]


@cache
def look_at_torch() -> None:
    """Raises RuntimeError where torch makes its groups in another way by now. Its first call reads a long file."""
    expect(c10d._new_process_group_helper, "backend_class = ProcessGroupGloo(", "backend_prefix_store,", "timeout=timeout,")


def _options(device: Any, timeout: timedelta) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [device], timeout
    return options
