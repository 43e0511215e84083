"""Which network interface NCCL's sockets take."""

from __future__ import annotations

import os

import pytest

from megarl.network import choose_nccl_interface, interface_towards


def test_nccl_takes_the_interface_by_its_whole_name_unless_the_user_has_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    choose_nccl_interface(interface_towards("127.0.0.1"))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    choose_nccl_interface("eth0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0,ib1"
