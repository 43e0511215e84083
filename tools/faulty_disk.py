"""A disk that can be made full or slow, or hang: a file system in a file, throttled by Linux's block layer."""

import ctypes
import os
import subprocess
from itertools import count
from pathlib import Path

SIZE, CHUNK = 400 << 20, 1 << 16  # bytes
SPEED = 4_000_000  # bytes/s of a slow disk
THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")  # cgroups version 1, which can limit all processes together
NEW_MOUNTS = 0x00020000  # CLONE_NEWNS


def missing() -> str | None:
    """The reason why such a disk is not possible here; None if it is."""
    return "a disk that is full or slow needs root, and cgroups of version 1 (blkio)" if os.geteuid() or not THROTTLE.exists() else None


def mount_for_this_process_alone() -> None:
    """Make later mounts visible to this process and those that it starts only; they are unmounted when these processes end."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    _call("mount", "--make-rprivate", "/")


class FaultyDisk:
    """A disk mounted on `place`, a new directory; the image file beside it keeps what was written."""

    def __init__(self, place: Path) -> None:
        self._place, self.image, self._frozen = place, place.with_suffix(".img"), False
        place.mkdir(parents=True)
        with self.image.open("xb") as file:
            file.truncate(SIZE)
        _call("mkfs.ext4", "-q", "-m", "0", self.image)
        _call("mount", "-o", "loop", self.image, place)
        (place / "lost+found").rmdir()
        device = place.stat().st_dev
        self._device = f"{os.major(device)}:{os.minor(device)}"

    def fill(self) -> None:
        """Fill all free space."""
        with self._filler.open("wb") as file:
            for chunk in count():
                try:
                    os.posix_fallocate(file.fileno(), chunk * CHUNK, CHUNK)
                except OSError:  # no space is left
                    return

    def slow_down(self) -> None:
        """Limit writes to `SPEED` bytes per second from now on."""
        THROTTLE.write_text(f"{self._device} {SPEED}")

    def freeze(self) -> None:
        """Make writes hang until `thaw`; not even SIGKILL ends a process that is in one."""
        _call("fsfreeze", "--freeze", self._place)
        self._frozen = True

    def thaw(self) -> None:
        """Let the writes go on that hang."""
        if self._frozen:
            _call("fsfreeze", "--unfreeze", self._place)
            self._frozen = False

    def mend(self) -> None:
        """Make the disk neither full nor slow again, and let it go on."""
        self.thaw()
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
