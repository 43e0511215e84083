"""What a response can make a reward function do: each function takes what it needs to know of the host from `meta`, and returns a score.

Imported in the sandbox by tests/unit/sandbox/test_hostile.py; nothing here may be called outside of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {}


def hostile(function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    HOSTILE[function.__name__] = function
    return function


def score(response: str, meta: dict[str, Any]) -> Any:
    return 1.0 if response == "right" else HOSTILE[response](meta)


# What is the run's: its environment, processes, files and network. Each returns the number of secrets that it got.


@hostile
def environment(meta: dict[str, Any]) -> int:
    return int("RAY_AUTH_TOKEN" in os.environ) + sum(meta["secret"] in value for value in os.environ.values())


@hostile
def environment_of_the_run(meta: dict[str, Any]) -> int:
    return sum(meta["secret"] in _text(f"/proc/{pid}/environ") for pid in [meta["driver"], os.getppid(), 1])


@hostile
def environment_of_everybody(meta: dict[str, Any]) -> int:
    return sum(meta["secret"] in _text(f"/proc/{pid}/environ") for pid in range(1, 4096))


@hostile
def memory_of_the_run(meta: dict[str, Any]) -> int:
    return len(_text(f"/proc/{meta['driver']}/maps")) + len(_text(f"/proc/{meta['driver']}/mem"))


@hostile
def trace_the_run(meta: dict[str, Any]) -> int:
    return int(ctypes.CDLL(None).ptrace(16, meta["driver"], 0, 0) == 0)


@hostile
def home_directory(meta: dict[str, Any]) -> int:
    return int(meta["secret"] in _text(meta["secret_file"]))


@hostile
def home_directory_by_a_link(meta: dict[str, Any]) -> int:
    link = Path(os.environ["HOME"]) / "link"
    link.symlink_to(meta["secret_file"])
    return int(meta["secret"] in _text(str(link)))


@hostile
def home_directory_through_root(meta: dict[str, Any]) -> int:
    return sum(meta["secret"] in _text(f"/proc/{pid}/root{meta['secret_file']}") for pid in (1, os.getpid(), meta["driver"]))


@hostile
def home_directory_through_a_shell(meta: dict[str, Any]) -> int:
    return int(meta["secret"] in os.popen(f"cat {meta['secret_file']} 2>&1").read())


@hostile
def write_beside_the_run(meta: dict[str, Any]) -> int:
    return _writes(meta["touched"])


@hostile
def write_where_the_code_is(meta: dict[str, Any]) -> int:
    return _writes(__file__ + "c") + _writes(str(Path(json.__file__).with_name("evil.py")))


@hostile
def remove_the_code(meta: dict[str, Any]) -> int:
    try:
        os.unlink(__file__)
    except OSError:
        return 0
    return 1


@hostile
def mount_something(meta: dict[str, Any]) -> int:
    return int(ctypes.CDLL(None).mount(b"/", b"/mnt", None, 4096, None) == 0)


@hostile
def become_root_again(meta: dict[str, Any]) -> int:
    status = _text("/proc/self/status")
    return int("NoNewPrivs:\t1" not in status) if status else 0


@hostile
def run_a_setuid_program(meta: dict[str, Any]) -> int:
    return int("uid=0" in os.popen("su -c id nobody 2>&1 </dev/null").read() and os.getuid() != 0)


@hostile
def tcp_to_this_machine(meta: dict[str, Any]) -> int:
    return _connects(socket.AF_INET, ("127.0.0.1", meta["tcp_port"]))


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(b"hello", ("127.0.0.1", meta["udp_port"]))
        except OSError:
            return 0
    return 0  # the test looks whether it came


@hostile
def a_socket_in_the_file_tree(meta: dict[str, Any]) -> int:
    return _connects(socket.AF_UNIX, meta["unix_path"])


@hostile
def an_abstract_socket(meta: dict[str, Any]) -> int:
    return _connects(socket.AF_UNIX, "\0" + meta["abstract"])


@hostile
def shared_memory_of_the_run(meta: dict[str, Any]) -> int:
    return int(meta["secret"] in _text(meta["shared_memory"]))


@hostile
def kill_the_run(meta: dict[str, Any]) -> int:
    for pid in (meta["driver"], os.getppid()):
        try:
            os.kill(pid, 0)  # would a signal arrive?
        except OSError:
            continue
        return int(pid == meta["driver"])
    return 0


# Its own process: what it does to itself costs this one sample.


@hostile
def end_at_once(meta: dict[str, Any]) -> None:
    os._exit(3)


@hostile
def leave(meta: dict[str, Any]) -> None:
    sys.exit()


@hostile
def interrupt(meta: dict[str, Any]) -> None:
    raise KeyboardInterrupt


@hostile
def stop_iterating(meta: dict[str, Any]) -> None:
    raise GeneratorExit


@hostile
def crash(meta: dict[str, Any]) -> None:
    ctypes.string_at(0)


@hostile
def abort(meta: dict[str, Any]) -> None:
    os.abort()


@hostile
def recurse(meta: dict[str, Any]) -> int:
    return recurse(meta) + 1


@hostile
def recurse_in_c(meta: dict[str, Any]) -> int:
    nested: Any = []
    for _ in range(10**5):
        nested = [nested]
    return len(repr(nested))


@hostile
def stop_itself(meta: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


@hostile
def deaf_loop(meta: dict[str, Any]) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        pass


@hostile
def no_alarm(meta: dict[str, Any]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(60)


@hostile
def exit_from_a_thread(meta: dict[str, Any]) -> float:
    thread = threading.Thread(target=os._exit, args=(5,))
    thread.start()
    thread.join()
    return 1.0


@hostile
def ten_gigabytes(meta: dict[str, Any]) -> int:
    return len(bytearray(10 << 30))


@hostile
def memory_piece_by_piece(meta: dict[str, Any]) -> int:
    return len([bytearray(1 << 28) for _ in range(40)])


@hostile
def a_large_number(meta: dict[str, Any]) -> int:
    return len(str(10 ** (10**8)))


@hostile
def a_large_file(meta: dict[str, Any]) -> int:
    path = Path(os.environ["HOME"]) / "large"
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 31)
    except OSError:
        return 0
    finally:
        path.unlink(missing_ok=True)
    return 1


@hostile
def many_files(meta: dict[str, Any]) -> int:
    return len([open("/dev/null") for _ in range(10_000)])


@hostile
def many_threads(meta: dict[str, Any]) -> int:
    for _ in range(2_000):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return 0


# Its children and its channel.


@hostile
def fork_and_return_twice(meta: dict[str, Any]) -> float:
    os.fork()
    return 0.25


@hostile
def a_child_that_stays(meta: dict[str, Any]) -> float:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return 0.25


@hostile
def a_daemon(meta: dict[str, Any]) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
            time.sleep(600)
        os._exit(0)
    os.wait()
    return 0.25


@hostile
def a_hundred_children(meta: dict[str, Any]) -> float:
    for _ in range(100):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    return 0.25


@hostile
def a_fork_bomb(meta: dict[str, Any]) -> float:
    for _ in range(1000):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    return 1.0


@hostile
def a_child_that_dies_later(meta: dict[str, Any]) -> float:
    if os.fork() == 0:
        time.sleep(0.05)
        os._exit(9)
    return 0.25


@hostile
def garbage_on_every_descriptor(meta: dict[str, Any]) -> float:
    for descriptor in range(3, 64):
        _send(descriptor, b"\x00\x00\x00\x05hello")
    return 1.0


@hostile
def a_pickle_on_every_descriptor(meta: dict[str, Any]) -> float:
    payload = f"cposix\nsystem\n(S'touch {meta['touched']}'\ntR.".encode()
    for descriptor in range(3, 64):
        _send(descriptor, struct.pack("!i", len(payload)) + payload)
    return 1.0


@hostile
def an_endless_message(meta: dict[str, Any]) -> float:
    for descriptor in range(3, 64):
        _send(descriptor, b"\xff\xff\xff\xff" + b"x" * 100_000)
    return 1.0


@hostile
def half_a_message(meta: dict[str, Any]) -> None:
    for descriptor in range(3, 64):
        _send(descriptor, b"\x00\x00\x10\x00")
    time.sleep(60)


@hostile
def deep_json(meta: dict[str, Any]) -> float:
    return _say(b"[" * 60_000)


@hostile
def a_score_of_another_sample(meta: dict[str, Any]) -> float:
    return _say(b"[999, 1.0, {}, null]")


@hostile
def a_score_that_is_nan(meta: dict[str, Any]) -> float:
    json.dumps = lambda *_, **__: "[0, NaN, {}, null]"
    return 1.0


@hostile
def a_score_that_is_text(meta: dict[str, Any]) -> float:
    json.dumps = lambda *_, **__: '[0, "1", {}, null]'
    return 1.0


@hostile
def a_long_integer(meta: dict[str, Any]) -> float:
    return _say(b"[" + b"9" * 50_000 + b"]")


@hostile
def ready_again(meta: dict[str, Any]) -> float:
    return _say(b'["ready"]')


@hostile
def refused_late(meta: dict[str, Any]) -> float:
    return _say(b'["refused", "path: this run must end"]')


@hostile
def close_every_descriptor(meta: dict[str, Any]) -> float:
    os.closerange(0, 256)
    return 1.0


# Its return value.


class Evil(float):
    def __float__(self) -> float:
        raise SystemError("no")

    def __repr__(self) -> str:
        os._exit(7)


class Raises(Exception):
    def __str__(self) -> str:
        raise ValueError("and again")


@hostile
def an_evil_number(meta: dict[str, Any]) -> Any:
    return Evil(1)


@hostile
def an_exception_that_raises(meta: dict[str, Any]) -> Any:
    raise Raises


@hostile
def a_long_exception(meta: dict[str, Any]) -> Any:
    raise ValueError("x" * 10_000_000)


@hostile
def an_exception_that_clears_the_screen(meta: dict[str, Any]) -> Any:
    raise type("\x1b[2J\n\nmegarl: done", (Exception,), {})("\x1b]0;title\x07")


@hostile
def prints_that_clear_the_screen(meta: dict[str, Any]) -> float:
    os.write(2, b"\x1b[2J\x1b[31mred\n")
    return 1.0


@hostile
def prints_without_end(meta: dict[str, Any]) -> float:
    for _ in range(100):
        os.write(1, b"x" * 99_999 + b"\n")
    return 1.0


@hostile
def ten_thousand_parts(meta: dict[str, Any]) -> Any:
    return {"score": 1.0} | {f"part {number}": 1.0 for number in range(10_000)}


@hostile
def a_part_with_a_long_name(meta: dict[str, Any]) -> Any:
    return {"score": 1.0, "x" * 1_000_000: 1.0}


@hostile
def a_number_too_large(meta: dict[str, Any]) -> Any:
    return 10**400


@hostile
def a_number_whose_square_overflows(meta: dict[str, Any]) -> Any:
    return 1e308


@hostile
def a_decimal(meta: dict[str, Any]) -> Any:
    return Decimal(1)


@hostile
def a_fraction(meta: dict[str, Any]) -> Any:
    return Fraction(1, 2)


@hostile
def a_complex_number(meta: dict[str, Any]) -> Any:
    return 1j


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
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        try:
            client.connect(address)
        except OSError:
            return 0
    return 1


def _send(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, data)


def _say(message: bytes) -> float:
    """A message in the run's own form on every descriptor, before the score."""
    for descriptor in range(3, 64):
        _send(descriptor, struct.pack("!I", len(message)) + message)
    return 1.0
