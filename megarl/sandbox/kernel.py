"""The kernel's version, and the attributes and capabilities that a process sets for itself.

This module is imported in the sandbox, so it imports nothing else of megarl.
"""

import ctypes
import os
import re
import signal
import struct

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36
CAPABILITY_VERSION_3, CAP_DAC_READ_SEARCH = 0x20080522, 1 << 2  # from linux/capability.h


def at_least(major: int, minor: int) -> bool:
    """Return whether the kernel is Linux `major.minor` or later."""
    numbers = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (major, minor)


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends, for whatever reason."""
    prctl(PR_SET_PDEATHSIG, number)


def give_up_capabilities() -> None:
    """Give up all capabilities except that of reading other users' files, which the user's code may be among.

    With PR_SET_NO_NEW_PRIVS set, nothing restores them.
    """
    libc, header, sets = ctypes.CDLL(None, use_errno=True), struct.pack("Ii", CAPABILITY_VERSION_3, 0), ctypes.create_string_buffer(24)
    libc.capget(header, sets)
    _, permitted, *_ = struct.unpack("6I", sets)
    capability = permitted & CAP_DAC_READ_SEARCH
    if libc.capset(header, struct.pack("6I", capability, capability, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")
