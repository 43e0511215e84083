"""Rendezvous stores that listen on a single address."""

import socket
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import Any

import torch.distributed as dist

from megarl.upstream.expect import expect

_RENDEZVOUS: Any = import_module("torch.distributed.rendezvous")  # torch.distributed has a function of this name


def listen_store(host: str, world: int, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Open a rendezvous store that listens on `host` only.

    torch's own server binds every interface, so it is given a socket that is already bound.

    Args:
        host: an address of this machine.
        world: number of processes that will use the store, this one included.
        timeout_s: longest wait for a key of the store.

    Returns:
        The store, and its port.

    Raises:
        OSError: the address is not this machine's.
    """
    listener = socket.create_server((host, 0), backlog=1024)
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


def bind_stores(*modules: Any) -> None:
    """Let the stores that torch, and the given modules, open in this process from now on listen on their own address only.

    Args:
        modules: those that have imported TCPStore by name.
    """
    look_at_torch()
    for module in (_RENDEZVOUS, *modules):
        module.TCPStore = _bound


def _bound(host_name: str, port: int, **named: Any) -> dist.TCPStore:
    if named.get("is_master") and named.get("master_listen_fd") is None:
        listener = socket.create_server((host_name, port), backlog=1024)
        named = {**named, "multi_tenant": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(host_name, port, **named)


@cache
def look_at_torch() -> None:
    """Raise RuntimeError if torch no longer opens the stores of its groups in the expected way."""
    expect(_RENDEZVOUS._create_c10d_store, "return TCPStore(", "host_name=hostname,", "is_master=start_daemon,", "multi_tenant=True,")


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
