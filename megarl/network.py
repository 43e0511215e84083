"""Find the network interface of this machine that leads to a host. Linux, IPv4."""

from __future__ import annotations

import os
import socket

import psutil


def interface_towards(host: str) -> str:
    """The interface through which `host` is reached, or whose own address it is. Nothing is sent.

    Raises RuntimeError if no interface has the address from which it is reached.
    """
    return _interface_of(own_address(host))


def choose_nccl_interface(interface: str) -> None:
    """Make NCCL's sockets in this process listen on this interface, unless the user has named another (NCCL_SOCKET_IFNAME)."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without the "=", eth0 would also match eth01


def own_address(host: str) -> str:
    """This machine's address from which `host` is reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def free_port(address: str) -> int:
    """A port of this machine's `address` on which nothing listens."""
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def _interface_of(address: str) -> str:
    """The network interface that has an IPv4 address."""
    if address.startswith("127."):
        return "lo"
    for name, held in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in held):
            return name
    raise RuntimeError(f"no network interface of this machine has the address {address}")
