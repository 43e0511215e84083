"""Which sockets a process may make: a seccomp filter, which needs neither namespaces nor Landlock, and which containers grant.

Imports nothing of megarl, since it is imported in the sandbox.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from collections.abc import Sequence
from functools import cache

INTERNET = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""What is left where there is a network, be it a private one. Others, as AF_VSOCK, lead out of any network namespace."""
PAIRS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
"""Of the pairs that may be made without a network: these stay connected to each other, as those of datagrams do not."""

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EACCES  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # of linux/bpf_common.h, as it puts them together
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data; of arguments, the lower halves
CALLS = {"x86_64": (0xC000003E, 41, 53), "aarch64": (0xC00000B7, 198, 199)}  # AUDIT_ARCH, socket, socketpair
IO_URING_SETUP = 425  # it makes sockets, too (Linux 5.19)
X32 = 0x40000000  # from here on the same calls have other numbers (x86_64)
TYPE = 0xF  # of a socket, without SOCK_NONBLOCK and SOCK_CLOEXEC

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


@cache
def filtered() -> bool:
    """Whether this kernel, and what this process runs in, takes such a filter."""
    if platform.machine() not in CALLS:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None)  # sets none: there is no filter to read
    return ctypes.get_errno() == errno.EFAULT


def allow_only(families: Sequence[int]) -> None:
    """Only sockets of these families can be made, by this process and its children, for ever. Without any, pairs that are connected."""
    code = b"".join(struct.pack("=HBBI", *one) for one in program(families))
    kept = ctypes.create_string_buffer(code, len(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HP", len(code) // 8, ctypes.addressof(kept))):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def program(families: Sequence[int]) -> list[Instruction]:
    """The filter. It looks at every call to the kernel; any that has another architecture's numbers is denied."""
    architecture, make, pair = CALLS[platform.machine()]
    given = [(LOAD, 0, 0, FIRST), *_one_of(families)] if families else [(RETURN, 0, 0, DENY)]
    paired = given if families else [(LOAD, 0, 0, SECOND), (AND, 0, 0, TYPE), *_one_of(PAIRS)]
    return [
        *((LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, DENY)),
        *((LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, DENY)),
        *((EQUAL, 0, 1, IO_URING_SETUP), (RETURN, 0, 0, DENY)),
        *((EQUAL, 0, len(given), make), *given),
        *((EQUAL, 0, len(paired), pair), *paired),
        (RETURN, 0, 0, ALLOW),
    ]


def _one_of(values: Sequence[int]) -> list[Instruction]:
    """Allows a call whose argument, which is loaded, is one of these."""
    tests = [(EQUAL, len(values) - number, 0, int(value)) for number, value in enumerate(values)]
    return [*tests, (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
