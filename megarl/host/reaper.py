"""Clean up after a Ray session when its driver ends, however it ends. Run as a script: `python -I -S host/reaper.py DIRECTORY`.

Ray's workers outlive a killed driver by seconds, and nothing else removes the session's directory. The driver holds the other end of this
process's standard input, which closes when the driver has closed the session, or has ended. Then every process that has a file in the
session's directory open for writing is killed, and the directory is removed. If this process is killed too, the next start does both
(`megarl.host.scratch`).

A driver that is killed leaves no message, nor does one that calls Ray when one of Ray's own processes has ended, since Ray then ends it. So
this process prints one.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time

OVER = b"over"  # what a driver says that has closed its session
SILENT = "killed, as when memory runs out, or ended by Ray, one of whose own processes had ended"
REPORTED = "reported"  # a file in the session's directory: the driver has reported its failure, and ends without closing the session
END_S = 0.5  # for a driver to end, which closes its files before its children see that it has
QUIET_S = 1.0  # after this long without a new process of the session, it is over
LIMIT_S = 20.0


def members(*directories: str) -> list[int]:
    """This user's processes that have a file below these open for writing, as each of Ray's has its log; readers do not count."""
    roots = tuple(directory + os.sep for directory in directories)
    pids = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        opened = f"/proc/{pid}/fd"
        try:
            if (
                pid != os.getpid()
                and os.stat(opened).st_uid == os.geteuid()
                and any(_writes(f"{opened}/{n}", roots) for n in os.listdir(opened))
            ):
                pids.append(pid)
        except OSError:  # it has ended, or is somebody else's
            continue
    return pids


def _writes(descriptor: str, roots: tuple[str, ...]) -> bool:
    try:
        return os.readlink(descriptor).startswith(roots) and bool(os.lstat(descriptor).st_mode & stat.S_IWUSR)
    except FileNotFoundError:  # closed meanwhile
        return False


def end(spared: set[int], *directories: str, over: bool = False) -> int:
    """Kill the members of directories until no more appear, and return how many there were.

    Args:
        spared: pids of members that are not killed.
        directories: the sessions' directories.
        over: the session has been closed. Then there is nothing to wait for unless a first look finds members.
    """
    killed = set[int]()
    begun = last = time.monotonic()
    while time.monotonic() - begun < LIMIT_S:
        pids = set(members(*directories)) - spared
        for pid in pids:
            last = time.monotonic()
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids and (time.monotonic() - last >= QUIET_S or (over and not killed)):
            break
        time.sleep(0.1)
    return len(killed)


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a directory and what it holds, as far as that can be done.

    A response's program may have nested directories by the thousand, or taken its own rights away: Python's own removal is recursive until
    3.13, and gives up at a directory that it cannot read.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", os.fspath(path)], stderr=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; this process goes last
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    driver = os.getppid()
    over = sys.stdin.buffer.read() == OVER
    if not over:
        time.sleep(END_S)
        if os.getppid() != driver and not os.path.exists(os.path.join(sys.argv[1], REPORTED)):
            print(f"megarl: failed: {SILENT}", file=sys.stderr, flush=True)
    end({driver}, sys.argv[1], over=over)  # spare the driver, which may go on without the session
    remove_tree(sys.argv[1])
