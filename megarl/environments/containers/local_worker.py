"""The inside of a local container: `python -m megarl.environments.containers.local_worker CHANNEL`, started only by local.py.

It handles one request at a time. Requests are pickled: ("exec", command, directory, seconds, most), ("upload", path, data),
("download", path, offset). Messages sent, in JSON: ["ready", home], ["ran", exit status, output, why it was ended or null], ["uploaded"],
["data", bytes, size of the file], ["failed", text]. Bytes are in base64.
"""

import base64
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megarl.environments.containers.container import collected
from megarl.sandbox.bounded import MAX_TEXT, Answer, serve
from megarl.sandbox.channel import Channel
from megarl.sandbox.kernel import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, prctl

PART = 45_000  # bytes of a file in one message


def work(channel: Channel, answer: Answer) -> None:
    """Answer requests."""
    prctl(PR_SET_DUMPABLE, 0)  # so that no command can write into this process's memory, and thus answer for it
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a command leaves in the background becomes this process's child
    home = os.environ["HOME"]
    handlers: dict[str, Callable[..., list[Any]]] = {"exec": _exec, "upload": _upload, "download": _download}
    answer("ready", home)
    while True:
        what, *rest = pickle.loads(channel.receive())
        try:
            answer(*handlers[what](*rest))
        except OSError as error:
            answer("failed", error.strerror or f"not a file ({error})"[:MAX_TEXT])
        except MemoryError:
            answer("failed", "out of memory")


def _exec(command: str, directory: str, seconds: float, most: int) -> list[Any]:
    """Run a command."""
    with suppress(ChildProcessError):  # what earlier commands had left in the background, and the run has killed
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    variables = {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), "/usr/local/bin", os.environ["PATH"]]),
        **{name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH") if name in os.environ},
        **{"PYTHONDONTWRITEBYTECODE": "1", "GIT_CONFIG_NOSYSTEM": "1"},  # /etc may be closed to it, at which git gives up
    }
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,
    )

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    ran = collected(process, seconds, most, end)
    return ["ran", ran.code, base64.b64encode(ran.output).decode(), ran.ended]


def _upload(path: str, data: bytes) -> list[Any]:
    """Write a file, whose mode stays. Not into a pipe, whose reader it would wait for."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o644), "wb") as file:
        file.write(data)
    return ["uploaded"]


def _download(path: str, offset: int) -> list[Any]:
    """Read a part of a file. Not a pipe or a device, on which it would wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        file.seek(offset)
        return ["data", base64.b64encode(file.read(PART)).decode(), size]


if __name__ == "__main__":
    serve(work)
