"""Find the network interface of this machine that leads to a host. Linux, IPv4."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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


@contextmanager
def reserved_ports(address: str, count: int) -> Iterator[list[int]]:
    """Ports of this machine's `address` that the kernel gives to nobody else within the block.

    A socket with SO_REUSEADDR, as ZeroMQ's and Python's servers have it, may listen on each of them meanwhile. Processes that are forked
    within the block keep the ports, too.
    """
    with ExitStack() as sockets:
        ports = []
        for _ in range(count):
            holder = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((address, 0))
            ports.append(int(holder.getsockname()[1]))
        yield ports


def _interface_of(address: str) -> str:
    """The network interface that has an IPv4 address."""
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return name
    raise RuntimeError(f"no network interface of this machine has the address {address}")
