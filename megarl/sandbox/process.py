"""Start a process in the sandbox, and end it together with everything that it has started."""

import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import psutil

from megarl.config import SandboxSettings
from megarl.errors import Absent
from megarl.host.scratch import Scratch
from megarl.host.termination import withheld
from megarl.sandbox.calls import INTERNET, filtered
from megarl.sandbox.channel import ANSWER_BYTES, Channel
from megarl.sandbox.inside import END, Confinement
from megarl.sandbox.level import PACKAGE, RESOLVER, Bubblewrap, Level, bubblewrap, closed, exempt, level, meaning, readable, shut_in
from megarl.sandbox.signals import kept_inside
from megarl.text.display import printable

PRINTED_BYTES = 1 << 16  # maximum output of one process that is shown
LOG_BYTES = 16 << 20  # maximum size of a log, which a process shares with those that replace it
FIRST_USER = 1 << 30  # the lowest of the user ids that no account has
END_S, PRINTS_S, STOP_POLL_S = 10.0, 1.0, 0.001


def check(settings: SandboxSettings, key: str) -> None:
    """Raise Absent, with the key, if this machine does not allow the required level, or if a file or variable is missing."""
    if level() < Level[settings.require.upper()]:
        raise Absent(f"{key}.require: {settings.require}, and this machine allows only {level()} (megarl/sandbox/README.md says why)")
    for place in settings.readable:
        if not place.exists():
            raise Absent(f"{key}.readable: {place}: there is no such file or directory")
    for name in settings.env:
        if name not in os.environ:
            raise Absent(f"{key}.env: {name} is not set")


def guarantee(settings: SandboxSettings, key: str, code: Sequence[str] = ()) -> str:
    """Describe for the console how processes with these settings are isolated on this machine. Raises ConfigError as `check` does.

    Args:
        settings: a `sandbox` section.
        key: its dotted key.
        code: names of the user's modules that the processes import.
    """
    check(settings, key)
    return _way(settings, code).guarantee


@dataclass(frozen=True)
class _Way:
    """How a process is isolated."""

    places: Sequence[Path]
    program: Bubblewrap | None
    guarantee: str


def _way(settings: SandboxSettings, code: Sequence[str]) -> _Way:
    network = map(Path, RESOLVER) if settings.network and level() < Level.NAMESPACES else ()  # bubblewrap shows them by itself
    places, description = readable(code, [*settings.readable, *network]), meaning(level(), settings.network)
    program = bubblewrap() if level() == Level.NAMESPACES else None
    if program is None:
        return _Way(places, None, description)
    private = closed(places)
    drops = program.drops and private is None
    if exempt() and not drops:
        why = f"{private} is closed to other users" if private is not None else "root cannot become another user here"
        description += f"; as root, and with no bound on the number of its processes: {why}"
    return _Way(places, replace(program, drops=drops), description)


class SandboxedProcess:
    """A process `python -m module N`, where N is the descriptor of its end of `channel`; its main calls `inside.enter` first.

    Messages from the process are untrusted: treat them as hostile. Messages to it are trusted, and may be pickles.
    """

    def __init__(self, module: str, settings: SandboxSettings, code: Sequence[str] = (), log: Path | None = None) -> None:
        """
        Args:
            module: the module of megarl to run.
            settings: what the process may do.
            code: dotted names of the modules that it imports besides megarl.
            log: the file to which its output is appended; None: stderr.
        """
        way, home, directory = _way(settings, code), "/tmp", Path.cwd()
        own_end, process_end = socket.socketpair()
        self.channel = Channel(own_end, ANSWER_BYTES)
        self._scratch = Scratch("sandbox-") if level() < Level.NAMESPACES else None
        if self._scratch is not None:
            (inner := self._scratch.path / "home").mkdir()  # so that the process cannot reach the lock of the scratch directory
            home = str(inner)
        if not any(directory.is_relative_to(place.resolve()) for place in way.places):
            directory = Path(home)
        self.guarantee = way.guarantee
        """How the process is isolated, for the console."""
        command = [sys.executable, "-P", "-m", module, str(process_end.fileno())]
        environment = {
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", *settings.env) if name in os.environ},
            **{"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home},
            **{"PYTHONPATH": os.pathsep.join(importable()), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            "PYTHONUNBUFFERED": "1",  # so that output is not lost if it is killed
        }
        try:
            with withheld():
                self._child = subprocess.Popen(
                    command if way.program is None else [*shut_in(way.program, way.places, settings.network, directory), *command],
                    pass_fds=[process_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=directory if self._scratch is not None else "/",
                    start_new_session=True,  # Ctrl-C is handled by this process alone
                )
        except BaseException:
            self.channel.close()
            if self._scratch is not None:
                self._scratch.remove()
            raise
        finally:
            process_end.close()
        self._prints = threading.Thread(target=_show, args=(self._child.stdout, log), name="sandbox-prints", daemon=True)
        self._prints.start()
        confinement = Confinement(
            parent=os.getpid() if self._scratch is not None else None,
            user=FIRST_USER + secrets.randbelow(FIRST_USER) if way.program is not None and way.program.drops else None,
            memory_bytes=int(settings.memory_gb * (1 << 30)),
            readable=[str(place) for place in way.places] if level() == Level.LANDLOCK else None,
            scratch=home,
            network=settings.network,
            families=None if not filtered() else INTERNET if settings.network or way.program is not None else (),
            asked_about_signals=self._scratch is not None and kept_inside(),
        )
        with suppress(ConnectionError, TimeoutError):  # it has ended already, which `ended` reports
            self.channel.send(pickle.dumps(confinement), END_S)

    @property
    def pid(self) -> int:
        """The pid of the outermost process; when it ends, all others in the sandbox end too."""
        return self._child.pid

    @property
    def files(self) -> Path | None:
        """The only directory that it can write to; None if that is private to it."""
        return None if self._scratch is None else self._scratch.path

    def ended(self, within_s: float | None = None) -> str | None:
        """Return how it ended, such as `SIGSEGV` or `exit status 3`; None if it does not end within `within_s` seconds (None: 0)."""
        try:
            code = self._child.wait(0 if within_s is None else within_s)
        except subprocess.TimeoutExpired:
            return None
        number = -code if code < 0 else code - 128  # bubblewrap reports a signal as a shell does
        return signal.Signals(number).name if number in list(signal.Signals) else f"exit status {code}"

    def stopped(self) -> bool:
        """Return whether one of its processes is stopped by a signal."""
        for pid in (self._child.pid, *descendants(self._child.pid)):
            with suppress(psutil.Error):  # it has ended
                if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                    return True
        return False

    def death(self) -> str:
        """Return the message about a process whose channel has closed."""
        return f"worker died: {self.ended(END_S) or 'it closed its channel'}"

    def kill(self) -> None:
        """Kill the process and everything that it has started. Can be called twice."""
        if self._scratch is None and self._child.poll() is None:
            # bubblewrap's inner process sets its parent-death signal only after the outer one has let it continue (bubblewrap 0.11, main).
            # So both are killed here; the outer one is stopped first, so that it starts nothing meanwhile.
            self._child.send_signal(signal.SIGSTOP)
            deadline, state = time.monotonic() + END_S, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
            while os.waitid(os.P_PID, self._child.pid, state) is None and time.monotonic() < deadline:  # disk access can delay the stop
                time.sleep(STOP_POLL_S)
            with suppress(psutil.Error):  # it has ended by itself
                for inner in psutil.Process(self._child.pid).children():
                    inner.kill()
        # Without namespaces, the keeper ends the others; SIGKILL would not let it.
        for number in (END, signal.SIGKILL) if self._scratch is not None else (signal.SIGKILL,):
            self._child.send_signal(number)
            try:
                self._child.wait(END_S)
                break
            except subprocess.TimeoutExpired:
                continue
        self.channel.close()
        self._prints.join(PRINTS_S)
        if self._scratch is not None:
            self._scratch.remove()


def descendants(pid: int) -> Iterator[int]:
    """Yield the pids of a process's descendants, also of those that its threads have started. Not recursive: they may be a chain."""
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with suppress(OSError):  # it has ended, or the kernel does not provide this file
            for thread in os.listdir(f"/proc/{parent}/task"):
                with suppress(OSError):
                    children = list(map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split()))
                    yield from children
                    waiting += children


def _show(prints: IO[bytes], log: Path | None) -> None:
    """Copy the output of a process to the log or stderr, line by line, without control characters, at most `PRINTED_BYTES`."""
    remaining = PRINTED_BYTES
    with prints:
        while line := prints.readline(1 << 12):  # also read what is not shown, or the process would block on a full pipe
            if remaining <= 0:
                continue
            text = printable(line.decode(errors="replace").rstrip("\n")) + "\n"
            remaining -= len(line)
            if remaining <= 0:
                text += f"megarl: warning: a process has printed {PRINTED_BYTES} bytes; the rest is not shown\n"
            with (
                suppress(OSError),
                nullcontext(sys.stderr) if log is None else open(log, "a") as out,
            ):  # for example a full disk, or a console that is gone
                if log is None or os.fstat(out.fileno()).st_size < LOG_BYTES:
                    out.write(text)


def importable() -> Iterator[str]:
    """Yield the directories on Python's path, and megarl's, which an editable installation may not have on it."""
    yield from (os.path.abspath(path) for path in sys.path if path)
    yield str(PACKAGE.parent)
