"""The inside of the sandbox: how a process confines itself before it handles model output.

Of megarl, this module imports only this package, so that it does not delay the start of a process.
"""

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
from functools import partial
from types import FrameType
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

END = signal.SIGUSR2  # ends a keeper and what it keeps; a scheduler sends SIGTERM only to warn the run
REQUEST_BYTES = 1 << 30  # maximum size of a message from the run
FILES, PROCESSES = 256, 256
FILE_BYTES = 1 << 30
END_S = 5.0


@dataclass(frozen=True)
class Confinement:
    """The run's first message to the process."""

    parent: int | None  # pid of the run's process; None: namespaces end this process with it
    user: int | None  # the user id to switch to; None: keep the run's
    memory_bytes: int
    readable: list[str] | None  # paths for Landlock; None: the file tree is private, or there is no Landlock
    scratch: str
    network: bool
    families: Sequence[int] | None  # of the sockets that it may create; None: any, since no filter is available
    asked_about_signals: bool  # whether the keeper confines signals


def enter(descriptor: int) -> Channel:
    """Confine this process as the run's first message says, and return its channel to the run.

    This sets limits, gives up privileges, and closes off files and network. `descriptor`: its end of the channel.
    """
    channel = Channel(socket.socket(fileno=descriptor), REQUEST_BYTES)
    confinement = pickle.loads(channel.receive())
    assert isinstance(confinement, Confinement)
    if confinement.parent is not None:
        end_with_parent(END)
        if os.getppid() != confinement.parent:  # the parent died before the signal was set
            os._exit(0)
        _keep(channel, confinement.asked_about_signals)
        give_up_capabilities()
    _count_terminations()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if confinement.user is not None:
        os.setgroups([])
        os.setresgid(*[confinement.user] * 3)
        os.setresuid(*[confinement.user] * 3)  # this also drops all capabilities
        prctl(PR_SET_DUMPABLE, 1)  # otherwise its /proc/self would belong to root
    _limit(resource.RLIMIT_AS, confinement.memory_bytes)
    _limit(resource.RLIMIT_NOFILE, FILES)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    if confinement.parent is None and at_least(5, 14):  # counted per user namespace, so the user's other processes do not count
        _limit(resource.RLIMIT_NPROC, PROCESSES)
    if confinement.readable is not None:
        _landlock(confinement.readable, confinement.scratch, confinement.network)
    if confinement.families is not None:
        allow_only(confinement.families)
    return channel


_terminations = 0


def terminations() -> int:
    """The number of times that this process has received SIGTERM. Children that it had started may have died of it."""
    return _terminations


def _count_terminations() -> None:
    """Outlive SIGTERM, which was withheld until here. It has its usual meaning for children: the user's code ends them by it."""

    def count(number: int, frame: FrameType | None) -> None:
        global _terminations
        _terminations += 1

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is count:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        receive()

    receive = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])
    wait = partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGTERM, count)
    os.register_at_fork(before=wait, after_in_parent=receive, after_in_child=forget)
    receive()


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
    """Fork, and return in the child. The parent becomes the keeper: when the child or the run ends, it kills all descendants, and exits.

    Args:
        channel: the channel to the run; only the child keeps it open.
        asked_about_signals: filter the signals that the child and its descendants send.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become its children
    prctl(PR_SET_DUMPABLE, 0)  # so that no sandbox of this user can write into the memory of the keeper or of the child
    own_end, child_end = socket.socketpair()
    child = os.fork()
    if child == 0:
        own_end.close()
        end_with_parent(signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        os.setsid()  # so that no process of the child's session can join the keeper's process group
        with child_end:
            if asked_about_signals:
                socket.send_fds(child_end, [b"."], [asks := listener()])
                os.close(asks)  # otherwise the child could answer the notifications itself
        return
    channel.close()
    child_end.close()
    signal.signal(END, lambda number, frame: _end(128 + number))
    with own_end:
        for asks in socket.recv_fds(own_end, 1, 1)[1]:
            threading.Thread(target=judge, args=(asks,), daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == child:
            _end(os.waitstatus_to_exitcode(status) % 256 if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _end(code: int) -> NoReturn:
    """Kill every descendant, and exit. The children of those that die become this process's own."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # no child is left
            break
        time.sleep(0.01)
    os._exit(code)


def _children() -> Iterator[int]:
    """Yield the pids of this process's children."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it has ended
            if parent_and_group(pid)[0] == os.getpid():
                yield pid
