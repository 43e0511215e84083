"""What the processes of a run write to stdout and stderr: files in `logs/` of its directory, which stay however they end.

`rank-0.log`, `engine-1.log`, ...; the process that takes the place of another, or does its work in a run that goes on from a checkpoint,
begins `rank-0.2.log`.
"""

from __future__ import annotations

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
MOST_BYTES = 16 << 20  # of a file, about: once it has more, it is moved to `<name>.old`, which is lost then
LOOK_S = 5.0


def keep_output(run: Path, who: str) -> None:
    """From now on what this process writes, and what it starts, goes into the logs of a run.

    Nothing changes where there are none that can be written to: of a run on another machine's own disk, of a service without a directory.

    Args:
        run: the run's directory.
        who: what the process is in the run, say "rank 0".
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
    """A file for what others print, in the logs of a run; None where there can be none."""
    try:
        path, file = _create(run / LOGS, who)
    except OSError:
        return None
    os.close(file)
    return path


def _create(logs: Path, name: str) -> tuple[Path, int]:
    """A file that was not there yet. With O_APPEND what is written goes to its end, wherever that is after `_bound`."""
    for number in count(1):
        path = logs / (f"{name}.log" if number == 1 else f"{name}.{number}.log")
        with suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    raise AssertionError


class _Lossy(io.FileIO):
    """A full disk loses what is printed, and does not end whoever prints."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):
            return super().write(data) or 0
        return memoryview(data).nbytes


def _stream(descriptor: int) -> io.TextIOWrapper:
    """Unbuffered, so that nothing is lost where the process crashes."""
    raw = _Lossy(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)  # as of python -u


def _bound(path: Path) -> None:
    """Empties the file whenever it is too long, as long as stderr is this file; what others have inherited writes on at its beginning."""
    with suppress(OSError):  # the disk is gone
        file = os.fstat(2).st_ino
        while (now := os.fstat(2)).st_ino == file:
            if now.st_size > MOST_BYTES:
                with suppress(OSError):  # a full disk
                    shutil.copyfile(path, path.with_suffix(".old"))
                os.ftruncate(2, 0)
            time.sleep(LOOK_S)
