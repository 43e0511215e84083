"""Confine signals to a sandbox without a PID namespace: its keeper, the parent of its processes, decides on each one (Linux 5.5).

A seccomp filter cannot distinguish the sandbox's processes from others, so it suspends the call and notifies the keeper. Of megarl, this
module imports only this package.
"""

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from megarl.sandbox.calls import ALLOW, LOAD, NUMBER, RETURN, SIGNALLING, filtered, in_c, number, of
from megarl.sandbox.kernel import PR_SET_NO_NEW_PRIVS, at_least, prctl

SECCOMP_SET_MODE_FILTER, NEW_LISTENER, USER_NOTIF = 1, 8, 0x7FC00000  # from linux/seccomp.h, as are the following
RECEIVE, SEND, CONTINUE = 0xC0502100, 0xC0182101, 1
ASKED = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif: id, pid, flags; then nr, arch, instruction_pointer, args
ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, val, error, flags
EVERYBODY = -1


@cache
def kept_inside() -> bool:
    """Return whether this kernel supports such a keeper. Tried in a thread, so that the filter applies to nothing else."""
    tried: list[bool] = []

    def attempt() -> None:
        with suppress(OSError):
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            os.close(listener())
            tried.append(True)

    if filtered() and at_least(5, 5):
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    return bool(tried)


def listener() -> int:
    """Install the filter for this thread and its children. Return the descriptor that reports their signals. Raises OSError if refused."""
    notification = [one for call in SIGNALLING for one in of(call, [(RETURN, 0, 0, USER_NOTIF)])]
    with_length, _kept = in_c([(LOAD, 0, 0, NUMBER), *notification, (RETURN, 0, 0, ALLOW)])
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(number("seccomp"), SECCOMP_SET_MODE_FILTER, NEW_LISTENER, with_length)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "seccomp(SECCOMP_SET_MODE_FILTER)")
    return descriptor


def judge(listener: int) -> None:
    """Answer the filter's notifications forever: allow signals to descendants of this process, and refuse all others."""
    while True:
        notification = bytearray(ASKED.size)
        try:
            fcntl.ioctl(listener, RECEIVE, notification)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):  # the sender has ended, or was interrupted
                continue
            raise
        name, _, _, _, _, _, first, *_ = ASKED.unpack(notification)
        [target] = struct.unpack("=i", struct.pack("=I", first & 0xFFFFFFFF))
        refusal = _refusal(target)
        with suppress(OSError):  # the sender has ended
            fcntl.ioctl(listener, SEND, ANSWER.pack(name, 0, -refusal, 0 if refusal else CONTINUE))


def _refusal(target: int) -> int:
    """Return the errno for a signal to the process `target`, or if that is negative, to the process group -`target`; 0 if it is allowed."""
    if target == EVERYBODY:
        return errno.EPERM
    if target == 0:  # the sender's own group, in a session that does not include this process
        return 0
    reached = [target] if target > 0 else list(_group(-target))
    try:
        return errno.ESRCH if not reached else 0 if all(map(_inside, reached)) else errno.EPERM
    except OSError:  # the target has ended
        return errno.ESRCH


def _inside(pid: int) -> bool:
    while pid > 1:
        pid = parent_and_group(pid)[0]
        if pid == os.getpid():
            return True
    return False


def _group(number: int) -> Iterator[int]:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            if parent_and_group(pid)[1] == number:
                yield pid


def parent_and_group(pid: int) -> tuple[int, int]:
    """Return the parent's pid and the process group of a process. Raises OSError if it has ended."""
    with open(f"/proc/{pid}/stat") as file:
        _, parent, group, *_ = file.read().rpartition(")")[2].split()
    return int(parent), int(group)
