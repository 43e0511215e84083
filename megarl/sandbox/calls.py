"""A seccomp filter of system calls. It needs neither namespaces nor Landlock, and containers allow it too.

This module is imported in the sandbox, so it imports nothing else of megarl.
"""

import ctypes
import errno
import platform
import socket
import struct
from collections.abc import Sequence
from functools import cache

INTERNET = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""The families allowed with a network, even a private one. Others, such as AF_VSOCK, lead out of any network namespace."""
PAIRS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
"""The types of socket pairs allowed without a network. They stay connected to each other, unlike pairs of datagram sockets."""

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EACCES  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # combinations of the codes in linux/bpf_common.h
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data; for arguments, of their lower halves
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000  # from this number on, the same calls have second numbers (x86_64)
TYPE = 0xF  # mask of a socket's type, without SOCK_NONBLOCK and SOCK_CLOEXEC
OWNER_BY_FCNTL = (8, 15)  # F_SETOWN, F_SETOWN_EX: choose the process that gets a descriptor's signals, whose number F_SETSIG chooses
OWNER_BY_IOCTL = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP: likewise

# Numbers on x86_64 and on aarch64 (Linux's arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
LOOKED_AT = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prlimit64": (302, 261),
    "seccomp": (317, 277),
}
SIGNALLING = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
DENIED = {
    # Access to other processes of the same user: their memory and its placement, their descriptors, their execution, their end.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "get_robust_list": (274, 100),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "bpf": (321, 280),
    # What the processes of a user share and Landlock does not cover: keys, and the memory, messages and semaphores of System V and POSIX.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "semop": (65, 193),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "io_uring_setup": (425, 425),  # it can create sockets too (Linux 5.19)
}
NUMBERS = {**LOOKED_AT, **SIGNALLING, **DENIED}

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def number(call: str) -> int:
    """Return the number of a call on this machine."""
    return NUMBERS[call][tuple(AUDIT_ARCH).index(platform.machine())]


@cache
def filtered() -> bool:
    """Return whether the kernel, and the container if there is one, accept such a filter."""
    if platform.machine() not in AUDIT_ARCH:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None)  # sets no filter: EFAULT means that the kernel would have read one
    return ctypes.get_errno() == errno.EFAULT


def allow_only(families: Sequence[int]) -> None:
    """Install the filter, irrevocably, for this process and its children. Raises OSError if the kernel refuses it.

    Args:
        families: the families of sockets that may be created; if empty, only connected pairs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with_length, _kept = in_c(program(families))
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, with_length):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def in_c(instructions: Sequence[Instruction]) -> tuple[bytes, object]:
    """Return a filter as the kernel reads it (struct sock_fprog), and the buffer that it points to, which must be kept alive."""
    code = b"".join(struct.pack("=HBBI", *one) for one in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    return struct.pack("HP", len(instructions), ctypes.addressof(buffer)), buffer


def program(families: Sequence[int]) -> list[Instruction]:
    """Return the filter's instructions, which run for every system call. Calls with another architecture's numbers are denied."""
    families_allowed = [(LOAD, 0, 0, FIRST), *_one_of(families)] if families else [(RETURN, 0, 0, DENY)]
    paired = families_allowed if families else [(LOAD, 0, 0, SECOND), (AND, 0, 0, TYPE), *_one_of(PAIRS)]
    return [
        *((LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, AUDIT_ARCH[platform.machine()]), (RETURN, 0, 0, DENY)),
        *((LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, DENY)),
        *(one for call in DENIED for one in of(call, [(RETURN, 0, 0, DENY)])),
        *of("socket", families_allowed),
        *of("socketpair", paired),
        *of("fcntl", [(LOAD, 0, 0, SECOND), *_none_of(OWNER_BY_FCNTL)]),
        *of("ioctl", [(LOAD, 0, 0, SECOND), *_none_of(OWNER_BY_IOCTL)]),
        *of("prlimit64", [(LOAD, 0, 0, FIRST), *_one_of([0])]),  # only its own limits
        (RETURN, 0, 0, ALLOW),
    ]


def of(call: str, then: Sequence[Instruction]) -> list[Instruction]:
    """Return instructions that run `then` if `call` is made, and otherwise skip it. Every path through `then` must return."""
    return [(EQUAL, 0, len(then), number(call)), *then]


def _one_of(values: Sequence[int]) -> list[Instruction]:
    """Return instructions that allow the call if the loaded argument is one of `values`, and deny it otherwise."""
    return [*_tests(values), (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]


def _none_of(values: Sequence[int]) -> list[Instruction]:
    """Return instructions that deny the call if the loaded argument is one of `values`, and allow it otherwise."""
    return [*_tests(values), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]


def _tests(values: Sequence[int]) -> list[Instruction]:
    """Return instructions that skip the one that follows them if the loaded argument is one of `values`."""
    return [(EQUAL, len(values) - place, 0, int(value)) for place, value in enumerate(values)]
