"""The stdout and stderr of a run's processes: files in `logs/` of the run's directory, kept however the processes end.

They are named `rank-0.log`, `engine-1.log`, ...; a process that replaces another, or takes over its role in a run that resumes from a
checkpoint, begins `rank-0.2.log`.
"""

import io
import os
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

LOGS = "logs"
MAX_BYTES = 16 << 20  # approximate size of a file, beyond which its content replaces that of `<name>.old`
LOOK_S = 5.0


def keep_output(run: Path, who: str) -> None:
    """Redirect the output of this process, and of those it starts from now on, to the logs of a run.

    Does nothing if the logs cannot be written: those of a run on another machine's own disk, or of a service without a directory.

    Args:
        run: the run's directory.
        who: the role of the process in the run, say "rank 0".
    """
    try:
        path, file = _create(run / LOGS, who.replace(" ", "-"))
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    print(f"{who}: process {os.getpid()} on {socket.gethostname()}")
    threading.Thread(target=_bound, args=(path,), name="output", daemon=True).start()


def new_log(run: Path, who: str) -> Path | None:
    """Create a file in the logs of a run for the output of other processes; None if that is not possible."""
    try:
        path, file = _create(run / LOGS, who)
    except OSError:
        return None
    os.close(file)
    return path


def _create(logs: Path, name: str) -> tuple[Path, int]:
    """Create a new file. With O_APPEND, output goes to its end, wherever that is after `_bound` has truncated it."""
    for number in count(1):
        path = logs / (f"{name}.log" if number == 1 else f"{name}.{number}.log")
        with suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    raise AssertionError


class _Lossy(io.FileIO):
    """A file that drops what cannot be written: a full disk costs output, but does not end the process that prints."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return memoryview(data).nbytes


def _stream(descriptor: int) -> io.TextIOWrapper:
    """An unbuffered stream, so that nothing is lost if the process crashes."""
    raw = _Lossy(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)  # as of python -u


def _bound(path: Path) -> None:
    """Truncate the file whenever it is too long, while stderr is this file; processes that inherited it then write at its beginning."""
    with suppress(OSError):  # the disk is gone
        file = os.fstat(2).st_ino
        while (now := os.fstat(2)).st_ino == file:
            if now.st_size > MAX_BYTES:
                with suppress(OSError):  # a full disk
                    shutil.copyfile(path, path.with_suffix(".old"))
                os.ftruncate(2, 0)
            time.sleep(LOOK_S)
