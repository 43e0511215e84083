"""The inside of the sandbox: what a process does to itself before it touches what a model wrote.

Imports nothing of megarl but its own neighbours, so that a process starts in the time of its own work's imports.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from megarl.sandbox.calls import allow_only
from megarl.sandbox.channel import Channel
from megarl.sandbox.kernel import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    at_least,
    end_with_parent,
    give_up_capabilities,
    prctl,
)
from megarl.sandbox.signals import judge, listener, parent_and_group

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
    asked_about_signals: bool  # its keeper lets none out


def enter(descriptor: int) -> Channel:
    """The channel to the run, from inside: limits are set, privileges given up, files and network shut off."""
    channel = Channel(socket.socket(fileno=descriptor), REQUEST_BYTES)
    confinement = pickle.loads(channel.receive())
    assert isinstance(confinement, Confinement)
    if confinement.parent is not None:
        end_with_parent()
        if os.getppid() != confinement.parent:  # it died before we asked
            os._exit(0)
        _keep(channel, confinement.asked_about_signals)
        give_up_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if confinement.user is not None:
        os.setgroups([])
        os.setresgid(*[confinement.user] * 3)
        os.setresuid(*[confinement.user] * 3)  # which gives up all privileges, too
        prctl(PR_SET_DUMPABLE, 1)  # else its own /proc/self is root's
    _limit(resource.RLIMIT_AS, confinement.memory_bytes)
    _limit(resource.RLIMIT_NOFILE, FILES)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    if confinement.parent is None and at_least(5, 14):  # which counts by user namespace: not all that the user has on the machine
        _limit(resource.RLIMIT_NPROC, PROCESSES)
    if confinement.readable is not None:
        _landlock(confinement.readable, confinement.scratch, confinement.network)
    if confinement.families is not None:
        allow_only(confinement.families)
    return channel


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


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


def _keep(channel: Channel, asked_about_signals: bool) -> None:
    """Goes on in a child. This process stays behind as its parent: it ends with the run, and all descendants of the child with it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become its children
    prctl(PR_SET_DUMPABLE, 0)  # neither the child nor another sandbox of this user writes into this process's memory, or into the child's
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        here.close()
        end_with_parent(signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        os.setsid()  # no process of the child's session can join a group that this process is in
        with there:
            if asked_about_signals:
                socket.send_fds(there, [b"."], [asks := listener()])
                os.close(asks)  # else it could answer itself
        return
    channel.close()
    there.close()
    signal.signal(signal.SIGTERM, lambda number, frame: _end(128 + number))
    with here:
        for asks in socket.recv_fds(here, 1, 1)[1]:
            threading.Thread(target=judge, args=(asks,), daemon=True).start()
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
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            if parent_and_group(pid)[0] == os.getpid():
                yield pid
