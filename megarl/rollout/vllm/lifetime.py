"""Tie the processes of an engine to the one that starts them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Let the kernel kill this process as soon as its parent ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "an engine's core, its coordinator and its workers run in processes of their own"
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent.pid:  # the parent died before the signal was set
        os.kill(os.getpid(), signal.SIGKILL)
