"""Other processes of the same user, the run's among them. Each returns the number of ways that were open.

Ways into any process of the user are tried on a child, which nothing but the sandbox's own rules could keep from it.
"""

import ctypes
import fcntl
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.unit.sandbox.attacks import HOSTILE, hostile

LIBC = ctypes.CDLL(None)
PIDFD_OPEN, PIDFD_GETFD, PIDFD_SEND_SIGNAL = 434, 438, 424  # on each architecture
ADD_KEY, TGKILL, RT_SIGQUEUEINFO = (248, 234, 129) if platform.machine() == "x86_64" else (217, 131, 138)
PTRACE_SEIZE, FIOSETOWN, OWN_KEYS = 0x4206, 0x8901, -2


class Place(ctypes.Structure):
    """struct iovec"""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def works(call: Callable[[], Any]) -> int:
    """1 where it neither raises nor says that it has failed."""
    try:
        said = call()
    except OSError:
        return 0
    return int(not isinstance(said, int) or said >= 0)


def on_a_child(call: Callable[[int], Any]) -> int:
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    try:
        return works(lambda: call(child))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


HOSTILE.update(
    trace_a_process=lambda meta: on_a_child(lambda pid: LIBC.ptrace(PTRACE_SEIZE, pid, None, None)),
    read_anothers_memory=lambda meta: on_a_child(lambda pid: _copy(LIBC.process_vm_readv, pid)),
    write_anothers_memory=lambda meta: on_a_child(lambda pid: _copy(LIBC.process_vm_writev, pid)),
    hold_a_process=lambda meta: on_a_child(lambda pid: LIBC.syscall(PIDFD_OPEN, pid, 0)),
    take_anothers_descriptor=lambda meta: on_a_child(lambda pid: LIBC.syscall(PIDFD_GETFD, LIBC.syscall(PIDFD_OPEN, pid, 0), 1, 0)),
    limit_a_process=lambda meta: on_a_child(lambda pid: LIBC.prlimit(pid, 0, (ctypes.c_ulong * 2)(60, 60), None)),
    memory_shared_by_a_number=lambda meta: works(lambda: LIBC.shmctl(LIBC.shmget(0, 4096, 0o1600), 0, None)),
    keys_of_the_user=lambda meta: works(lambda: LIBC.syscall(ADD_KEY, b"user", b"megarl-test", b"x", ctypes.c_long(1), OWN_KEYS)),
)


@hostile
def have_the_kernel_signal_a_process(meta: dict[str, Any]) -> int:
    """Whom a descriptor belongs to gets a signal when something comes, and F_SETSIG says which."""
    pipe, _ = os.pipe()
    by_fcntl = on_a_child(lambda pid: fcntl.fcntl(pipe, fcntl.F_SETOWN, pid))
    return by_fcntl + on_a_child(lambda pid: fcntl.ioctl(pipe, FIOSETOWN, pid.to_bytes(4, sys.byteorder)))


@hostile
def signal_the_run(meta: dict[str, Any]) -> int:
    """Would one arrive?"""
    pid = meta["driver"]
    return sum(
        map(
            works,
            (
                lambda: os.kill(pid, 0),
                lambda: os.killpg(os.getpgid(pid), 0),
                lambda: LIBC.syscall(TGKILL, pid, pid, 0),
                lambda: LIBC.syscall(RT_SIGQUEUEINFO, pid, 0, (ctypes.c_int * 32)(0, 0, -1)),
                lambda: LIBC.syscall(PIDFD_SEND_SIGNAL, os.open(f"/proc/{pid}", os.O_RDONLY), 0, None, 0),
            ),
        )
    )


@hostile
def end_the_keeper(meta: dict[str, Any]) -> int:
    """The process that ends with the run, and all in the sandbox with it: by its number, its group, its memory, and by all numbers."""
    keeper = os.getppid()
    signals = (lambda: os.kill(keeper, 0), lambda: os.killpg(keeper, 0), lambda: os.kill(-1, 0), lambda: os.setpgid(0, keeper))
    return sum(map(works, (*signals, lambda: os.open(f"/proc/{keeper}/mem", os.O_RDWR))))


@hostile
def a_child_that_is_killed(meta: dict[str, Any]) -> float:
    """No attack: children, groups of them and itself may be signalled."""
    try:
        subprocess.run(["sleep", "60"], timeout=0.05)
    except subprocess.TimeoutExpired:
        group = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
        time.sleep(0.05)
        os.killpg(group.pid, signal.SIGTERM)
        got: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
        signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(0, signal.SIGUSR2)
        return 0.25 * (group.wait() == -signal.SIGTERM and len(got) == 2)
    return 0.0


def _copy(call: Callable[..., int], pid: int) -> int:
    """A few bytes of its memory, which has this process's addresses."""
    ours, theirs = ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)
    places = [ctypes.byref(Place(ctypes.addressof(buffer), 8)) for buffer in (ours, theirs)]
    return call(pid, places[0], ctypes.c_ulong(1), places[1], ctypes.c_ulong(1), ctypes.c_ulong(0))
