"""Ends what is left of a Ray session when its driver ends, however it ends. Run as a script: `python -I -S reaper.py DIRECTORY`.

Ray's agents outlive a killed driver by a minute: they see that their raylet is gone and then wait for a GCS that is gone too
(ray/_private/utils.py, publish_error_to_driver). The driver holds the other end of this process's standard input, which ends with
the driver. Then every process that has a file of the session's directory open is killed, and the directory removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

QUIET_S = 1.0  # so long without a new process of the session: it is over
LIMIT_S = 20.0


def members(directory: str) -> list[int]:
    """The processes that have a file under `directory` open: each of Ray's writes a log there."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            opened = [os.readlink(f"/proc/{pid}/fd/{descriptor}") for descriptor in os.listdir(f"/proc/{pid}/fd")]
        except OSError:  # it has ended, or is somebody else's
            continue
        if pid != os.getpid() and any(path.startswith(directory + os.sep) for path in opened):
            found.append(pid)
    return found


def reap(directory: str, driver: int) -> None:
    """Kills the session's processes until none appears any more; the driver, where it goes on without the session, is spared."""
    ended = last = time.monotonic()
    while time.monotonic() - last < QUIET_S and time.monotonic() - ended < LIMIT_S:
        for pid in set(members(directory)) - {driver}:
            last = time.monotonic()
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; this process goes last
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    driver = os.getppid()
    sys.stdin.buffer.read()
    reap(sys.argv[1], driver)
