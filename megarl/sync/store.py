"""Rendezvous stores that listen on a single address."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def listen_store(host: str, world: int, timeout_s: float, port: int = 0) -> tuple[dist.TCPStore, int]:
    """Open a rendezvous store that listens on `host` only.

    torch's own server binds every interface, so it is given a socket that is already bound.

    Args:
        host: an address of this machine.
        world: number of processes that will use the store, this one included.
        timeout_s: longest wait for a key of the store.
        port: the port to listen on; 0: any free one.

    Returns:
        The store, and its port.

    Raises:
        OSError: the address is not this machine's, or the port is taken.
    """
    listener = socket.create_server((host, port), backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        world,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns it from here on
    )
    return store, port


def connect_store(host: str, port: int, world: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the store that another process opened with `listen_store`.

    Args:
        host: the address that the store listens on.
        port: the port that `listen_store` returned.
        world: as given to `listen_store`.
        timeout_s: longest wait for the store to answer, and later for a key of it.

    Raises:
        torch.distributed.DistNetworkError: no store answers.
    """
    return dist.TCPStore(host, port, world, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
