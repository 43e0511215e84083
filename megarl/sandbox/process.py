"""Starts a process in the sandbox, and ends it with everything that it has started."""

from __future__ import annotations

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

from megarl.config import ConfigError, SandboxSettings
from megarl.sandbox.calls import INTERNET, filtered
from megarl.sandbox.channel import ANSWER_BYTES, Channel
from megarl.sandbox.inside import Confinement
from megarl.sandbox.level import PACKAGE, Bubblewrap, Level, bubblewrap, closed, exempt, level, meaning, readable, shut_in
from megarl.sandbox.signals import kept_inside
from megarl.scratch import Scratch
from megarl.text import printable

PRINTED_BYTES = 1 << 16  # most that a process shows of what it prints
LOG_BYTES = 16 << 20  # most that all processes of one log do, however often one takes another's place
FIRST_USER = 1 << 30  # of the numbers that no account has
END_S, PRINTS_S, STOP_POLL_S = 10.0, 1.0, 0.001


def check(settings: SandboxSettings, key: str) -> None:
    """Refuses, with the key, what this machine cannot grant and what is not there."""
    if level() < Level[settings.require.upper()]:
        raise ConfigError(f"{key}.require: {settings.require}, and this machine allows only {level()} (megarl/sandbox/README.md says why)")
    for place in settings.readable:
        if not place.exists():
            raise ConfigError(f"{key}.readable: {place}: there is no such file or directory")
    for name in settings.env:
        if name not in os.environ:
            raise ConfigError(f"{key}.env: {name} is not set")


def guarantee(settings: SandboxSettings, key: str, code: Sequence[str] = ()) -> str:
    """What processes with these settings are kept from on this machine, and what not, for the console. ConfigError as of `check`.

    Args:
        settings: a section `sandbox`.
        key: its dotted key.
        code: "module" of functions that the processes import.
    """
    check(settings, key)
    return _way(settings, code).guarantee


@dataclass(frozen=True)
class _Way:
    """How a process is shut in."""

    places: Sequence[Path]
    program: Bubblewrap | None
    guarantee: str


def _way(settings: SandboxSettings, code: Sequence[str]) -> _Way:
    places, said = readable(code, settings.readable), meaning(level(), settings.network)
    program = bubblewrap() if level() == Level.NAMESPACES else None
    if program is None:
        return _Way(places, None, said)
    private = closed(places)
    drops = program.drops and private is None
    if exempt() and not drops:
        why = f"{private} is closed to other users" if private is not None else "root cannot become another user here"
        said += f"; as root, and with no bound on the number of its processes: {why}"
    return _Way(places, replace(program, drops=drops), said)


class SandboxedProcess:
    """`python -m module N`, N being its end of `channel`; its main calls `inside.enter` before anything else.

    What comes through the channel is to be read as the work of an enemy. Messages to the process are not: they may be pickles.
    """

    def __init__(self, module: str, settings: SandboxSettings, code: Sequence[str] = (), log: Path | None = None) -> None:
        """
        Args:
            module: what is started; a module of megarl.
            settings: what it may do.
            code: modules, by dotted name, that it will import beside megarl.
            log: the file to which what it prints is added; None: stderr.
        """
        way, home, here = _way(settings, code), "/tmp", Path.cwd()
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, ANSWER_BYTES)
        self._scratch = Scratch("sandbox-") if level() < Level.NAMESPACES else None
        if self._scratch is not None:
            (inner := self._scratch.path / "home").mkdir()  # who is inside does not reach the lock
            home = str(inner)
        if not any(here.is_relative_to(place) for place in way.places):
            here = Path(home)
        self.guarantee = way.guarantee
        """For the console: what it is kept from, and what not."""
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        environment = {
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", *settings.env) if name in os.environ},
            **{"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home},
            **{"PYTHONPATH": os.pathsep.join(_importable()), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            "PYTHONUNBUFFERED": "1",  # what it prints is not lost where it is killed
        }
        try:
            self._child = subprocess.Popen(
                command if way.program is None else [*shut_in(way.program, way.places, settings.network, here), *command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=here if self._scratch is not None else "/",
                start_new_session=True,  # Ctrl-C is this process's business
            )
        except BaseException:
            self.channel.close()
            if self._scratch is not None:
                self._scratch.remove()
            raise
        finally:
            theirs.close()
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
        with suppress(ConnectionError, TimeoutError):  # it has ended already, as `ended` will say
            self.channel.send(pickle.dumps(confinement), END_S)

    @property
    def pid(self) -> int:
        """Of the process that all others in the sandbox end with."""
        return self._child.pid

    def ended(self, within_s: float | None = None) -> str | None:
        """How it ended: `SIGSEGV`, `exit status 3`; None where it has not, and does not within these seconds."""
        try:
            code = self._child.wait(0 if within_s is None else within_s)
        except subprocess.TimeoutExpired:
            return None
        number = -code if code < 0 else code - 128  # bubblewrap ends as a shell does
        return signal.Signals(number).name if number in list(signal.Signals) else f"exit status {code}"

    def stopped(self) -> bool:
        """Whether a signal has stopped one of its processes."""
        for pid in _with_children(self._child.pid):
            with suppress(psutil.Error):  # it has ended
                if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                    return True
        return False

    def death(self) -> str:
        """What is said of a process whose channel has closed."""
        return f"worker died: {self.ended(END_S) or 'it closed its channel'}"

    def kill(self) -> None:
        """Ends it and all that it has started. Can be called twice."""
        if self._scratch is None and self._child.poll() is None:
            # bubblewrap's inner process asks to end with the outer one only once that has let it go on (bubblewrap 0.11, main): both here.
            self._child.send_signal(signal.SIGSTOP)
            deadline, state = time.monotonic() + END_S, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
            while os.waitid(os.P_PID, self._child.pid, state) is None and time.monotonic() < deadline:  # the disk may hold it up
                time.sleep(STOP_POLL_S)
            with suppress(psutil.Error):  # it has ended by itself
                for inner in psutil.Process(self._child.pid).children():
                    inner.kill()
        # Without namespaces the parent inside ends the others, which SIGKILL would not let it do.
        for number in (signal.SIGTERM, signal.SIGKILL) if self._scratch is not None else (signal.SIGKILL,):
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


def _with_children(pid: int) -> Iterator[int]:
    """A process and what it has started. psutil would read every process of the machine for that, of each sandbox."""
    yield pid
    with suppress(OSError):  # it has ended, or the kernel has no such file
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _with_children(int(child))


def _show(prints: IO[bytes], log: Path | None) -> None:
    """Copies what a process prints: line by line, without control characters, `PRINTED_BYTES` at most."""
    left = PRINTED_BYTES
    with prints:
        while line := prints.readline(1 << 12):  # read it is in any case, or the process would wait for that
            if left <= 0:
                continue
            said = printable(line.decode(errors="replace").rstrip("\n")) + "\n"
            left -= len(line)
            if left <= 0:
                said += f"megarl: warning: a process has printed {PRINTED_BYTES} bytes; the rest is not shown\n"
            with (
                suppress(OSError),
                nullcontext(sys.stderr) if log is None else open(log, "a") as out,
            ):  # a full disk, a console that has gone
                if log is None or os.fstat(out.fileno()).st_size < LOG_BYTES:
                    out.write(said)


def _importable() -> Iterator[str]:
    """Python's path, and where megarl lies, which an editable installation may not have on it."""
    yield from (os.path.abspath(path) for path in sys.path if path)
    yield str(PACKAGE.parent)
