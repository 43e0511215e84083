"""A disk that can be full or slow: a file system in a file, which Linux's block layer throttles."""

from __future__ import annotations

import ctypes
import os
import subprocess
from itertools import count
from pathlib import Path

SIZE, CHUNK = 400 << 20, 1 << 16  # bytes
SPEED = 4_000_000  # bytes/s of a slow one
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")  # of version 1, where a limit for all processes can be set
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def missing() -> str | None:
    """Why there can be none here, if so."""
    return "a disk that is full or slow needs root, and cgroups of version 1 (blkio)" if os.geteuid() or not THROTTLE.exists() else None


def mount_for_this_process_alone() -> None:
    """What is mounted from now on only this process and those that it starts see, and it ends with them."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    _call("mount", "--make-rprivate", "/")


class FaultyDisk:
    """Mounted on `place`, a new directory; the file beside it keeps what was written."""

    def __init__(self, place: Path) -> None:
        self._place, self.image = place, place.with_suffix(".img")
        place.mkdir(parents=True)
        with self.image.open("xb") as file:
            file.truncate(SIZE)
        _call("mkfs.ext4", "-q", "-m", "0", self.image)
        _call("mount", "-o", "loop", self.image, place)
        (place / "lost+found").rmdir()
        device = place.stat().st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"

    def fill(self) -> None:
        """Takes what is free."""
        with self._filler.open("wb") as file:
            for chunk in count():
                try:
                    os.posix_fallocate(file.fileno(), chunk * CHUNK, CHUNK)
                except OSError:  # no space is left
                    return

    def slow_down(self) -> None:
        """Takes `SPEED` bytes a second from now on."""
        THROTTLE.write_text(f"{self._device} {SPEED}")

    def mend(self) -> None:
        """It is as it was made."""
        self._filler.unlink(missing_ok=True)
        THROTTLE.write_text(f"{self._device} 0")

    def close(self) -> None:
        self.mend()
        _call("umount", "--lazy", self._place)

    @property
    def _filler(self) -> Path:
        return self._place / ".filler"


def _call(*command: str | Path) -> None:
    subprocess.run(command, check=True)
