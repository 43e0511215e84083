"""Containers that are sandboxes of megarl: nothing has to be installed, and every level of isolation will do.

The programs and libraries are the machine's. The limits on processes, memory and disk are looked after from outside, since the kernel
counts only what each process has: a command that exceeds one is ended, with all that it has started.
"""

import base64
import errno
import json
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.config import SandboxSettings
from megarl.environments.containers.container import TICK_S, ContainerGone, Ran
from megarl.sandbox.channel import BadMessage
from megarl.sandbox.process import END_S, SandboxedProcess, descendants
from megarl.text.display import printable

DISK_BYTES = 1 << 30  # most bytes of files, as in the private /tmp of a sandbox with namespaces
DISK_TICK_S = 0.5
MUCH_ON_DISK = f"more than {DISK_BYTES >> 30} GB on disk, or longer paths than the kernel reads"
GRACE_S = 5.0  # in which the inside itself ends a command that is late
FILE_S = 60.0  # to write or read a file
NO_ANSWER = "it wrote an invalid answer"
PAGE = os.sysconf("SC_PAGE_SIZE")


class LocalContainer:
    """A container on this machine.

    Args:
        settings: what the sandbox may do.
        processes: most processes in it.
        start_s: time limit of its start.
    """

    def __init__(self, settings: SandboxSettings, processes: int, start_s: float) -> None:
        self._settings, self._most_processes, self._start_s = settings, processes, start_s
        self._lock = threading.Lock()
        self._sandboxed: SandboxedProcess | None = None
        self._stopped = False
        self._own = frozenset[int]()  # the pids of the sandbox itself
        self.home = ""

    def start(self) -> None:
        """Start the sandbox. Raises ContainerGone if that fails."""
        with self._lock:
            if self._stopped:
                raise ContainerGone("it was stopped")
            self._sandboxed = SandboxedProcess("megarl.environments.containers.local_worker", self._settings)
        match self._answer(self._start_s):
            case ["ready", str(home)]:
                self.home = home
            case _:
                raise ContainerGone(NO_ANSWER)
        self._own = frozenset([self._sandboxed.pid, *descendants(self._sandboxed.pid)])

    def exec(self, command: str, directory: str, within_s: float, most: int) -> Ran:
        """Run a shell command, and end whatever it has started. Raises ContainerGone."""
        over: list[str] = []
        last = [time.monotonic()]

        def look() -> None:
            if not over and (why := self._excess(last)) is not None:
                over.append(why)
            if over:
                self._end_commands()

        try:
            answer = self._ask(("exec", command, directory, within_s, most), within_s + GRACE_S, look)
            self._end_commands()
        except ContainerGone as gone:
            raise ContainerGone(f"{gone}{f' ({over[0]})' if over else ''}") from None
        if not over and self._written() > DISK_BYTES:
            over.append(MUCH_ON_DISK)
        if over and over[0] == MUCH_ON_DISK:
            raise ContainerGone(over[0])
        match answer:
            case ["ran", int(code), str(output), why] if why is None or isinstance(why, str):
                ended = over[0] if over else None if why is None else printable(why)
                return Ran(code, self._shown(_bytes(output)), ended)
            case ["failed", str(text)]:
                return Ran(126, f"the command cannot be started: {printable(text)}".encode())
        raise ContainerGone(NO_ANSWER)

    def upload(self, path: str, data: bytes) -> None:
        """Write a file. Raises OSError and ContainerGone."""
        match self._ask(("upload", path, data), FILE_S):
            case ["uploaded"]:
                return
            case ["failed", str(text)]:
                raise OSError(printable(text))
        raise ContainerGone(NO_ANSWER)

    def download(self, path: str, most: int) -> bytes:
        """Return a file. Raises OSError and ContainerGone."""
        data = bytearray()
        while True:
            match self._ask(("download", path, len(data)), FILE_S):
                case ["data", str(part), int(size)]:
                    data += (more := _bytes(part))
                    if size > most or len(data) > most:
                        raise OSError(f"{size} bytes, more than {most}")
                    if not more:
                        return bytes(data)
                case ["failed", str(text)]:
                    raise OSError(printable(text))
                case _:
                    raise ContainerGone(NO_ANSWER)

    def stop(self) -> None:
        """End the sandbox, and remove its files. Can be called twice, and from another thread."""
        with self._lock:
            if not self._stopped and self._sandboxed is not None:
                self._sandboxed.kill()
            self._stopped = True

    def _ask(self, request: tuple[Any, ...], within_s: float, look: Callable[[], None] = lambda: None) -> Any:
        assert self._sandboxed is not None
        with suppress(OSError):  # it has ended or is stopped, which `_answer` will notice
            self._sandboxed.channel.send(pickle.dumps(request), within_s)
        return self._answer(within_s, look)

    def _answer(self, within_s: float, look: Callable[[], None] = lambda: None) -> Any:
        """Return the next message, calling `look` meanwhile. Raises ContainerGone if there is none in time, or if it is invalid."""
        assert self._sandboxed is not None
        channel, deadline = self._sandboxed.channel, time.monotonic() + within_s
        try:
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            while True:
                for message in channel.arrived(1):
                    return json.loads(message)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ContainerGone("timeout")
                if not poll.poll(1000 * min(TICK_S, left)):
                    look()
        except (EOFError, OSError, ValueError, RecursionError, BadMessage) as error:
            if self._stopped:
                raise ContainerGone("it was stopped") from None
            if isinstance(error, EOFError | OSError):
                raise ContainerGone(self._sandboxed.ended(END_S) or "it closed its channel") from None
            raise ContainerGone(NO_ANSWER) from None

    def _excess(self, last: list[float]) -> str | None:
        """Return which limit the commands exceed; None if none. `last`: when the files were measured."""
        pids = list(self._living())
        if len(pids) > self._most_processes:
            return f"more than {self._most_processes} processes"
        most = int(self._settings.memory_gb * (1 << 30))
        if sum(map(_memory, pids)) > most:
            return f"more than {self._settings.memory_gb:g} GB of memory"
        if time.monotonic() - last[0] > DISK_TICK_S:
            excess = self._written() > DISK_BYTES
            last[0] = time.monotonic()
            return MUCH_ON_DISK if excess else None
        return None

    def _living(self) -> Iterator[int]:
        """Yield the pids of what commands have started, without those that have ended and are not reaped yet."""
        assert self._sandboxed is not None
        return (pid for pid in descendants(self._sandboxed.pid) if pid not in self._own and _state(pid) not in ("Z", "X", ""))

    def _end_commands(self) -> None:
        """Kill what commands have started, each stopped first, so that it starts nothing more. Raises ContainerGone if some are left."""
        deadline = time.monotonic() + END_S
        while pids := list(self._living()):
            if time.monotonic() > deadline:
                raise ContainerGone(f"{len(pids)} of its processes cannot be ended")
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)

    def _written(self) -> int:
        """The size of the container's files, as far as they are on this machine's disk; a private /tmp has its own limit."""
        return 0 if self._sandboxed is None or self._sandboxed.files is None else _size(self._sandboxed.files)

    def _shown(self, output: bytes) -> bytes:
        """An output without the random name of the sandbox's directory, so that it repeats."""
        return output.replace(self.home.encode(), b"~")


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ContainerGone(NO_ANSWER) from None


def _memory(pid: int) -> int:
    """The resident bytes of a process."""
    try:
        return PAGE * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _size(directory: Path) -> int:
    """The bytes that the files below a directory take; too many if a path is too long to be looked at."""
    total, directories = 0, [os.fspath(directory)]
    while directories:
        try:
            with os.scandir(directories.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        total += 512 * entry.stat(follow_symlinks=False).st_blocks
                        if entry.is_dir(follow_symlinks=False):
                            directories.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return DISK_BYTES + 1
    return total
