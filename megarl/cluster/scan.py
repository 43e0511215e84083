"""Find the processes of this machine that a signal has stopped. Everything is read from /proc; nobody is asked."""

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

STOPPED = "Tt"  # the states of proc(5) of a process that is stopped: by a signal, by a debugger
TITLE = 80  # characters that are shown of a command line


@dataclass(frozen=True)
class StoppedProcess:
    """A process that is stopped."""

    pids: tuple[int, ...]  # its own, and those of its ancestors
    title: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.title} (pid {self.pids[0]}) has been stopped by a signal for {self.seconds:.0f} s"


@dataclass(frozen=True)
class _Process:
    state: str
    parent: int
    session: int


class Scan:
    """A repeated scan of some processes and their descendants, which remembers since when each has been stopped.

    Sandboxes are left out: what runs there may stop itself, and whoever waits for it has a time limit. A sandbox's first process leads a
    session of its own (`sandbox/process.py`), which nothing inside can change.

    Args:
        *roots: the processes that are scanned, with all that they start.
    """

    def __init__(self, *roots: int) -> None:
        self._roots, self._since = roots, dict[int, float]()
        self._last: list[StoppedProcess] = []

    def stopped(self, longest_s: float, only: Collection[int] | None = None) -> list[StoppedProcess]:
        """Return the processes that have been stopped for longer. `only`: restricts them to these and their descendants."""
        now, table = time.monotonic(), _table()
        since = {pid: self._since.get(pid, now) for pid in _family(self._roots, table) if table[pid].state in STOPPED}
        processes = list[StoppedProcess]()
        for pid, start in since.items():
            pids = (pid, *_ancestors(pid, table))
            if now - start > longest_s and (only is None or not set(only).isdisjoint(pids)):
                processes.append(StoppedProcess(pids, _title(pid), now - start))
        self._since, self._last = since, processes
        return processes

    def end(self) -> None:
        """Kill the processes found by the last scan: a stopped process does not end itself when it is asked to."""
        for one in self._last:
            with suppress(ProcessLookupError):
                os.kill(one.pids[0], signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped now; False if it has ended."""
    process = _read(pid)
    return process is not None and process.state in STOPPED


def kill_children(parent: int, pids: Collection[int]) -> None:
    """Kill those of these processes that this parent has started."""
    for pid in pids:
        if (process := _read(pid)) is not None and process.parent == parent:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _table() -> dict[int, _Process]:
    """All processes of this machine, by pid."""
    processes = ((int(name), _read(int(name))) for name in os.listdir("/proc") if name.isdecimal())
    return {pid: process for pid, process in processes if process is not None}


def _read(pid: int) -> _Process | None:
    """What /proc/PID/stat says; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # a command's name may contain anything
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _Process(fields[0].decode(), int(fields[1]), int(fields[3]))


def _family(roots: Sequence[int], table: Mapping[int, _Process]) -> list[int]:
    """The roots and their descendants, without sandboxes."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    family, waiting = list[int](), [root for root in dict.fromkeys(roots) if root in table]
    while waiting:
        pid = waiting.pop()
        family.append(pid)
        sandboxes = () if pid in roots else [child for child in children.get(pid, ()) if table[child].session == child]
        waiting += [child for child in children.get(pid, ()) if child not in sandboxes]
    return list(dict.fromkeys(family))


def _ancestors(pid: int, table: Mapping[int, _Process]) -> list[int]:
    ancestors = list[int]()
    while (process := table.get(ancestors[-1] if ancestors else pid)) is not None and process.parent and process.parent not in ancestors:
        ancestors.append(process.parent)
    return ancestors


def _title(pid: int) -> str:
    """The start of a process's command line, or its name."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read(4 * TITLE).replace(b"\0", b" ").decode(errors="replace")
        return words[:TITLE].strip()
    return ""
