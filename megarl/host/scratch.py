"""Directories below the temporary one that are removed with their owner, however it ends.

An owner holds a lock on a file in its directory, and so may a process that cleans up after it. If all of them were killed, the kernel has
released the lock: the next start then kills any processes that are left, and removes the directory. A directory without such a file, of
another user, or of another machine or boot (a lock on a shared disk may not be visible) has an unknown owner, and is kept.
"""

import fcntl
import os
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from megarl.errors import Unfit
from megarl.host.reaper import end, remove_tree

PREFIX, OWNER = "megarl-", "owner"
SHORT = "/tmp"  # for directories whose paths must be short


class Scratch:
    """A private directory, below the temporary one or another. Raises Unfit if it cannot be written to."""

    def __init__(self, kind: str = "", below: str | None = None) -> None:
        below = below or _temporary()
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX + kind, dir=below))
            new = self.path / (OWNER + ".new")
            try:
                self.lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(self.lock, _boot())
            except OSError:
                shutil.rmtree(self.path)
                raise
        except OSError as error:
            raise Unfit(f"TMPDIR: cannot write to {below}: {error.strerror}") from None
        with suppress(OSError):  # a disk without locks: nobody will sweep the directory
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path / OWNER)  # only now that it is locked can others find it

    def remove(self) -> None:
        """Remove the directory and its contents. May be called twice."""
        remove_tree(self.path)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def sweep() -> None:
    """Kill the processes and remove the directories of owners that were killed along with the process that would have cleaned up.

    Raises Unfit if there is no temporary directory.
    """
    locks = {}
    for below in {_temporary(), SHORT}:
        try:
            entries = os.scandir(below)
        except OSError as error:
            raise Unfit(f"TMPDIR: cannot read {below}: {error.strerror}") from None
        with entries:
            for entry in entries:
                lock = _take(Path(entry.path)) if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False) else None
                if lock is not None:
                    locks[entry.path] = lock
    for path in [path for path in locks if _holds_a_living_one(Path(path))]:
        os.close(locks.pop(path))
    if locks:
        ended = end(set(), *locks)
        for path, lock in locks.items():
            _remove(Path(path))
            os.close(lock)
        print(f"megarl: cleaned up after a killed run: removed {', '.join(sorted(locks))}, ended {ended} processes", file=sys.stderr)


def _temporary() -> str:
    """The directory that TMPDIR names, and no other: Python would fall back to the next one that it can write to."""
    try:
        usual = tempfile.gettempdir()  # also caches it, before a session sets TMPDIR for its processes
    except FileNotFoundError as error:
        raise Unfit(f"TMPDIR: {error.strerror}") from None
    return os.path.abspath(os.environ.get("TMPDIR") or usual)


def _boot() -> bytes:
    """The id of the running kernel, which stands for this machine since its last boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()


def _take(directory: Path) -> int | None:
    """Take the lock of a directory whose owner is known and has ended; None for any other directory."""
    path = directory / OWNER
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # O_NONBLOCK in case it is not a regular file
    except OSError:
        return None
    with suppress(OSError):
        status = os.fstat(lock)
        known = stat.S_ISREG(status.st_mode) and status.st_uid == directory.lstat().st_uid == os.geteuid() and os.read(lock, 99) == _boot()
        if known:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.lstat(), status):  # not removed meanwhile
                return lock
    os.close(lock)
    return None


def _holds_a_living_one(directory: Path) -> bool:
    """Whether a run is still going that was started by this owner's processes, and whose directory lies inside this one."""
    waiting = [str(directory)]
    while waiting:  # not recursive: what a killed run's programs have left may be nested as deep as a path can be
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                waiting.append(entry.path)
                if entry.name.startswith(PREFIX) and os.path.lexists(os.path.join(entry.path, OWNER)):
                    lock = _take(Path(entry.path))
                    if lock is None:
                        return True
                    os.close(lock)
    return False


def _remove(directory: Path) -> None:
    """Remove a directory, its lock last, so that the next start finds whatever could not be removed now."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        elif path.name != OWNER:
            path.unlink(missing_ok=True)
    remove_tree(directory)
