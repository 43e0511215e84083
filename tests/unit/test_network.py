"""Which network interface NCCL's sockets take, and ports that are kept for their owners."""

import os
import socket

import pytest

from megarl.host.network import choose_nccl_interface, interface_towards, reserved_ports

HERE = "127.0.0.1"


def test_nccl_takes_the_interface_by_its_whole_name_unless_the_user_has_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    choose_nccl_interface(interface_towards("127.0.0.1"))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    choose_nccl_interface("eth0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0,ib1"


def test_a_reserved_port_is_given_to_nobody_else_and_its_owner_listens_on_it() -> None:
    with reserved_ports(HERE, 3) as ports:
        assert len(set(ports)) == 3 and not any(free(port) for port in ports)
    assert any(free(port) for port in ports)
    with (
        reserved_ports(HERE, 1) as [port],
        socket.create_server((HERE, port)) as owner,
        socket.create_connection((HERE, port)) as client,
        owner.accept()[0] as served,
    ):
        client.sendall(b"there")
        assert served.recv(5) == b"there"


def free(port: int) -> bool:
    """Whether the kernel would give this port to a program that asks for any."""
    with socket.socket() as stranger:
        try:
            stranger.bind((HERE, port))
        except OSError:
            return False
        return True
