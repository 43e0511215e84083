"""The directory of a run: one run at a time writes to it, and the files of earlier runs are kept."""

import fcntl
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.config import ConfigError
from megarl.errors import Stopped

LOCK = ".lock"
LOCK_S, POLL_S = 180.0, 1.0  # LOCK_S: how long a shared disk may still hold the lock of a job's machine that has died


def claim(directory: Path, *, patient: bool) -> int:
    """Create the directory and lock it for this process; return the lock's file descriptor.

    If the file system does not support locks, nothing keeps two runs apart; a message on stderr says so.

    Args:
        directory: the run's directory.
        patient: whether to wait up to LOCK_S if another process holds the lock.

    Raises:
        ConfigError: another process holds the lock, or nothing can be written there.
        Stopped: another process still holds the lock after LOCK_S, with `patient`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: cannot make {directory}: {error.strerror}") from None
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # NFS can lock only files open for writing, not directories
    except OSError as error:
        raise ConfigError(f"run_dir: cannot write to {directory}: {error.strerror}") from None
    deadline = time.monotonic() + (LOCK_S if patient else 0.0)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise (Stopped if patient else ConfigError)(f"name: {directory} is in use by another run") from None
        except OSError as error:
            print(f"megarl: {directory}: no lock keeps another run out ({error.strerror})", file=sys.stderr)
            return lock
        time.sleep(POLL_S)


def set_aside(directory: Path, names: Sequence[str], model: Path) -> Path | None:
    """Move what an earlier run wrote under these names to earlier-<n>/, so that runs do not mix and nothing is lost.

    Args:
        directory: the run's directory.
        names: names of files and folders inside it.
        model: `model.path` of the run that begins.

    Returns:
        The directory to which they were moved; None if there was nothing to move.

    Raises:
        ConfigError: the model lies in what would be moved.
    """
    paths = [directory / name for name in names if (directory / name).exists()]
    for path in paths:
        if model.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"name: {directory} holds model.path={model}, which a run of this name would move away")
    if not paths:
        return None
    number = 1 + max((int(path.name.removeprefix("earlier-")) for path in directory.glob("earlier-[0-9]*")), default=0)
    aside = directory / f"earlier-{number}"
    aside.mkdir()
    for path in paths:
        path.rename(aside / path.name)
    return aside
