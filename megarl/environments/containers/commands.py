"""Containers of podman or apptainer, through their command lines.

Options as documented in podman-run(1), podman-exec(1), podman-rm(1) of podman 5, and in `apptainer help instance start`, `exec` and
`instance stop` of apptainer 1.4. An image needs `sh`, `cat`, `mkdir` and `timeout`.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config import CommandContainers, SandboxSettings
from megarl.environments.containers.container import ContainerGone, Ran, collected
from megarl.errors import Absent
from megarl.text.display import one_line

LONGEST_S = 6 * 3600  # after which podman ends a container whose run was killed
GRACE_S, FILE_S, STOP_S = 15.0, 300.0, 60.0
SAID = 2000  # bytes of an engine's errors
KILLED, OWN_ERRORS = 137, 125  # exit statuses: of a command that got SIGKILL; from here on they may be the engine's own
WRITE = 'mkdir -p -- "$1" && cat > "$2"'
READ = 'cat -- "$1" 2>&1'


@dataclass(frozen=True)
class Words:
    """The command lines of an engine, without its program."""

    start: Sequence[str]
    exec: Sequence[str]
    """Before a command that has no directory of its own."""
    directory: str
    """The option of `exec` that names the directory."""
    name: str
    """How `exec` names the container."""
    stop: Sequence[str]


def podman(name: str, image: str, sandbox: SandboxSettings, processes: int, options: Sequence[str]) -> Words:
    """Return podman's command lines. The container has no network, no capabilities, and ends by itself after `LONGEST_S`.

    Args:
        name: the container's.
        image: its image.
        sandbox: memory and network.
        processes: most processes in it.
        options: further ones of `podman run`.
    """
    memory = f"{int(sandbox.memory_gb * 1024)}m"
    start = [
        *("run", "--detach", "--rm", "--init", "--name", name, *(() if sandbox.network else ("--network", "none"))),
        *("--http-proxy=false", "--memory", memory, "--memory-swap", memory, "--pids-limit", str(processes)),
        *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--timeout", str(LONGEST_S), *options),
        *("--entrypoint", "sleep", image, "infinity"),
    ]
    return Words(start, ("exec", "--interactive"), "--workdir", name, ("rm", "--force", "--time", "0", name))


def apptainer(name: str, image: str, sandbox: SandboxSettings, processes: int, options: Sequence[str]) -> Words:
    """Return apptainer's command lines. What is written goes to a temporary overlay, whose size the machine's apptainer.conf sets.

    Args:
        name: the instance's.
        image: a file, an address, or the name of an image in a registry of docker's.
        sandbox: memory and network.
        processes: most processes in it.
        options: further ones of `apptainer instance start`.
    """
    network = [] if sandbox.network else ["--net", "--network", "none"]
    source = image if "://" in image or Path(image).exists() else f"docker://{image}"
    start = [
        *("instance", "start", "--containall", "--cleanenv", "--no-privs", "--writable-tmpfs", *network),
        *("--memory", f"{int(sandbox.memory_gb * 1024)}M", "--pids-limit", str(processes), *options, source, name),
    ]
    return Words(start, ("exec", "--cleanenv"), "--pwd", f"instance://{name}", ("instance", "stop", "--force", name))


ENGINES = {"podman": podman, "apptainer": apptainer}


def program(source: CommandContainers) -> str:
    """Return the path of an engine's program. Raises Absent if there is none on this machine."""
    path = shutil.which(source.program or source.type)
    if path is None:
        raise Absent(f"environment.source.containers: {source.program or source.type}: no such program on this machine")
    return path


class CommandContainer:
    """A container of podman or apptainer.

    Args:
        source: the engine.
        image: its image.
        sandbox: memory and network.
        processes: most processes in it.
        start_s: time limit of its start, which may have to fetch the image.
    """

    home = "/tmp"

    def __init__(self, source: CommandContainers, image: str, sandbox: SandboxSettings, processes: int, start_s: float) -> None:
        self._program, self._start_s = program(source), start_s
        self._words = ENGINES[source.type](f"megarl-{secrets.token_hex(8)}", image, sandbox, processes, source.options)
        self._lock, self._stopped = threading.Lock(), False

    def start(self) -> None:
        """Start it. Raises ContainerGone with what the engine says if that fails."""
        ran = self._run(self._words.start, self._start_s)
        if ran.ended or ran.code:
            raise ContainerGone(ran.ended or f"it does not start: {_error_line(ran)}")
        with self._lock:
            if self._stopped:  # meanwhile, when there was nothing to remove yet
                self._run(self._words.stop, STOP_S)
                raise ContainerGone("it was stopped")

    def exec(self, command: str, directory: str, within_s: float, most: int) -> Ran:
        """Run a shell command. What it leaves in the background goes on until the container is stopped. Raises ContainerGone."""
        return self._inside(["sh", "-c", command], within_s, most, directory=directory)

    def upload(self, path: str, data: bytes) -> None:
        """Write a file. Raises OSError and ContainerGone."""
        ran = self._inside(["sh", "-c", WRITE, "sh", str(Path(path).parent), path], FILE_S, 1000, data)
        if ran.ended or ran.code:
            raise OSError(ran.ended or _error_line(ran))

    def download(self, path: str, most: int) -> bytes:
        """Return a file. Raises OSError and ContainerGone."""
        ran = self._inside(["sh", "-c", READ, "sh", path], FILE_S, max(2 * most + 2, 4000), apart=True)
        if ran.ended or ran.code or len(ran.output) > most:
            raise OSError(ran.ended or (_error_line(ran) if ran.code else f"more than {most} bytes"))
        return ran.output

    def stop(self) -> None:
        """Remove it. Can be called twice, and from another thread."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._run(self._words.stop, STOP_S)

    def _inside(
        self, words: Sequence[str], within_s: float, most: int, data: bytes = b"", directory: str | None = None, *, apart: bool = False
    ) -> Ran:
        """Run a program in the container. The engine's client does not end it when it is itself ended, so `timeout` does.

        `apart`: see `_run`.
        """
        place, begun = [] if directory is None else [self._words.directory, directory], time.monotonic()
        limited = ["timeout", "--signal=KILL", f"{within_s:g}", *words]
        ran = self._run([*self._words.exec, *place, self._words.name, *limited], within_s + GRACE_S, most, data, apart=apart)
        if ran.ended is not None:
            raise ContainerGone("timeout")
        if ran.code == KILLED and time.monotonic() - begun >= within_s:
            return Ran(ran.code, ran.output, f"not done after {within_s:g} s")
        if not 0 <= ran.code < OWN_ERRORS and self._run([*self._words.exec, self._words.name, "true"], FILE_S).code:
            raise ContainerGone(f"it does not answer: {_error_line(ran)}")
        return ran

    def _run(self, words: Sequence[str], within_s: float, most: int = 2000, data: bytes = b"", *, apart: bool = False) -> Ran:
        """Run the engine's program.

        Args:
            words: its arguments.
            within_s: its time limit.
            most: how many bytes of its output are kept.
            data: what it reads.
            apart: its standard error, which has the engine's own warnings too, is no part of the output, unless it fails.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
            given.write(data)
            given.seek(0)
            try:
                process = subprocess.Popen(
                    [self._program, *words],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=errors if apart else subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ContainerGone(f"{self._program} cannot be run: {error.strerror}") from None
            ran = collected(process, within_s, most, process.kill)
            if not apart or not ran.code:
                return ran
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - SAID))
            return replace(ran, output=errors.read(SAID) + ran.output)


def _error_line(ran: Ran) -> str:
    """The last line of what an engine said, which is its error."""
    lines = ran.output.decode(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else f"exit status {ran.code}"
