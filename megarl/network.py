"""Which network interface of this machine leads somewhere. Linux, IPv4."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915  # the IPv4 address of an interface


def interface_towards(host: str) -> str:
    """The interface through which `host` is reached, or whose own address it is. Nothing is sent.

    Raises RuntimeError where no interface has the address from which it is reached.
    """
    return _interface_of(own_address(host))


def own_address(host: str) -> str:
    """The address of this machine from which `host` is reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def _interface_of(address: str) -> str:
    """The network interface that has an IPv4 address."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                packed = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(packed[20:24]) == address:
                return name
    raise RuntimeError(f"no network interface of this machine has the address {address}")
