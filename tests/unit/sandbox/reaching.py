"""What is the run's: its environment, processes, files and network. Each returns the number of secrets that it got."""

import ctypes
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.unit.sandbox.attacks import HOSTILE, hostile

HOSTILE.update(
    environment=lambda meta: int("RAY_AUTH_TOKEN" in os.environ) + sum(meta["secret"] in value for value in os.environ.values()),
    environment_of_the_run=lambda meta: sum(meta["secret"] in _text(f"/proc/{pid}/environ") for pid in [meta["driver"], os.getppid(), 1]),
    environment_of_everybody=lambda meta: sum(meta["secret"] in _text(f"/proc/{pid}/environ") for pid in range(1, 4096)),
    memory_of_the_run=lambda meta: len(_text(f"/proc/{meta['driver']}/maps")) + len(_text(f"/proc/{meta['driver']}/mem")),
    trace_the_run=lambda meta: int(ctypes.CDLL(None).ptrace(16, meta["driver"], 0, 0) == 0),
    home_directory=lambda meta: int(meta["secret"] in _text(meta["secret_file"])),
    home_directory_through_a_shell=lambda meta: int(meta["secret"] in os.popen(f"cat {meta['secret_file']} 2>&1").read()),
    write_beside_the_run=lambda meta: _writes(meta["touched"]),
    write_where_the_code_is=lambda meta: _writes(__file__ + "c") + _writes(str(Path(json.__file__).with_name("evil.py"))),
    mount_something=lambda meta: int(ctypes.CDLL(None).mount(b"/", b"/mnt", None, 4096, None) == 0),
    run_a_setuid_program=lambda meta: int("uid=0" in os.popen("su -c id nobody 2>&1 </dev/null").read() and os.getuid() != 0),
    tcp_to_this_machine=lambda meta: _connects(socket.AF_INET, ("127.0.0.1", meta["tcp_port"])),
    a_socket_in_the_file_tree=lambda meta: _connects(socket.AF_UNIX, meta["unix_path"]),
    an_abstract_socket=lambda meta: _connects(socket.AF_UNIX, "\0" + meta["abstract"]),
    shared_memory_of_the_run=lambda meta: int(meta["secret"] in _text(meta["shared_memory"])),
)


@hostile
def home_directory_by_a_link(meta: dict[str, Any]) -> int:
    link = Path(os.environ["HOME"]) / "link"
    link.symlink_to(meta["secret_file"])
    return int(meta["secret"] in _text(str(link)))


@hostile
def home_directory_through_root(meta: dict[str, Any]) -> int:
    return sum(meta["secret"] in _text(f"/proc/{pid}/root{meta['secret_file']}") for pid in (1, os.getpid(), meta["driver"]))


@hostile
def remove_the_code(meta: dict[str, Any]) -> int:
    try:
        os.unlink(__file__)
    except OSError:
        return 0
    return 1


@hostile
def become_root_again(meta: dict[str, Any]) -> int:
    status = _text("/proc/self/status")
    return int("NoNewPrivs:\t1" not in status) if status else 0


@hostile
def tcp_listen(meta: dict[str, Any]) -> int:
    try:
        with socket.create_server(("0.0.0.0", meta["free_port"])):
            time.sleep(0.1)
    except OSError:
        pass
    return 0  # the test connects from outside


@hostile
def udp_to_this_machine(meta: dict[str, Any]) -> int:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"hello", ("127.0.0.1", meta["udp_port"]))
    except OSError:
        pass
    return 0  # the test looks whether it came


@hostile
def a_datagram_into_the_file_tree(meta: dict[str, Any]) -> int:
    try:
        one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # of which each end sends wherever it likes
        return one.sendto(b"hello", meta["datagram_path"])
    except OSError:
        return 0


@hostile
def a_socket_to_the_hypervisor(meta: dict[str, Any]) -> int:
    """It would lead out of any network namespace."""
    try:
        with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM):
            return 1
    except OSError:
        return 0


@hostile
def a_socket_by_another_call(meta: dict[str, Any]) -> int:
    parameters = ctypes.create_string_buffer(120)
    return int(ctypes.CDLL(None).syscall(425, 1, parameters) >= 0)  # io_uring_setup


@hostile
def kill_the_run(meta: dict[str, Any]) -> int:
    for pid in (meta["driver"], os.getppid()):
        try:
            os.kill(pid, 0)  # would a signal arrive?
        except OSError:
            continue
        return int(pid == meta["driver"])
    return 0


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _writes(path: str) -> int:
    try:
        Path(path).write_text("written")
    except OSError:
        return 0
    return 1


def _connects(family: int, address: Any) -> int:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(1)
            client.connect(address)
    except OSError:
        return 0
    return 1
