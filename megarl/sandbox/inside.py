"""The inside of the sandbox: what a process does to itself before it touches what a model wrote.

Imports nothing of megarl but its own neighbours, so that a process starts in the time of its own work's imports.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megarl.sandbox.channel import Channel
from megarl.sandbox.sockets import allow_only

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 38, 36
REQUEST_BYTES = 1 << 30  # most of one message from the run
FILES, PROCESSES = 256, 256
FILE_BYTES = 1 << 30
END_S = 5.0


@dataclass(frozen=True)
class Confinement:
    """What the run says first."""

    parent: int | None  # the run's process, where no namespace ends this one with it
    user: int | None  # to become; None: it is not root's, or must stay so to read its files
    memory_bytes: int
    readable: list[str] | None  # for Landlock; None: the file tree is private, or there is no Landlock
    scratch: str
    network: bool
    families: Sequence[int] | None  # of the sockets that it may make; None: of any, since no filter is granted


def enter(descriptor: int) -> Channel:
    """The channel to the run, from inside: limits are set, privileges given up, files and network shut off."""
    channel = Channel(socket.socket(fileno=descriptor), REQUEST_BYTES)
    confinement = pickle.loads(channel.receive())
    assert isinstance(confinement, Confinement)
    if confinement.parent is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != confinement.parent:  # it died before we asked
            os._exit(0)
        _keep(channel)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if confinement.user is not None:
        os.setgroups([])
        os.setresgid(*[confinement.user] * 3)
        os.setresuid(*[confinement.user] * 3)  # which gives up all privileges, too
        _prctl(PR_SET_DUMPABLE, 1)  # else its own /proc/self is root's
    _limit(resource.RLIMIT_AS, confinement.memory_bytes)
    _limit(resource.RLIMIT_NOFILE, FILES)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    if confinement.parent is None and _counts_by_namespace():
        _limit(resource.RLIMIT_NPROC, PROCESSES)
    if confinement.readable is not None:
        _landlock(confinement.readable, confinement.scratch, confinement.network)
    if confinement.families is not None:
        allow_only(confinement.families)
    return channel


def _counts_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts the processes of a user namespace (Linux 5.14), not all that the user has on the machine."""
    numbers = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (5, 14)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _landlock(readable: list[str], scratch: str, network: bool) -> None:
    from landlockpy import AccessFS, AccessNet, Ruleset, Scope

    read = AccessFS.READ_FILE | AccessFS.READ_DIR | AccessFS.EXECUTE
    file_only = AccessFS.READ_FILE | AccessFS.EXECUTE
    write = ~AccessFS.NONE
    scoped = Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET
    with Ruleset(handled_net=AccessNet.NONE if network else None, scoped=scoped) as rules:
        for path in readable:
            rules.allow_path(path, read if os.path.isdir(path) else file_only)
        for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
            rules.allow_path(device, AccessFS.READ_FILE | AccessFS.WRITE_FILE)
        rules.allow_path(scratch, write)
        rules.restrict()


def _keep(channel: Channel) -> None:
    """Goes on in a child. This process stays behind as its parent: it ends with the run, and all descendants of the child with it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become its children
    child = os.fork()
    if child == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    channel.close()
    signal.signal(signal.SIGTERM, lambda number, frame: _end(128 + number))
    while True:
        pid, status = os.wait()
        if pid == child:
            _end(os.waitstatus_to_exitcode(status) % 256 if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _end(code: int) -> NoReturn:
    """Kills every descendant and ends: as children die, theirs become ours."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none is left
            break
        time.sleep(0.01)
    os._exit(code)


def _children() -> Iterator[int]:
    """The processes whose parent this one is."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        if int(parent) == os.getpid():
            yield int(pid)
