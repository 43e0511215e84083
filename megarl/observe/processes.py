"""The peak memory of a run's processes, by kind of process."""

import math
import os
import time
from pathlib import Path

import psutil

RAY_DAEMONS = ("gcs_server", "raylet")
SHARE = 0.05  # largest share of the time spent on sampling, which has to look at all of the machine's processes
OTHER = "other"  # anything else that the driver's process may have started


class PeakMemory:
    """The largest resident set that any process of each kind ever had, in MB (2^20 bytes).

    Covers the driver and its descendants on this machine; `sample` must be called while they are alive. Linux only (VmHWM).
    """

    def __init__(self) -> None:
        self._peak: dict[str, float] = {}
        self._due = -math.inf

    def sample(self) -> None:
        """Read the kernel's high-water mark of every process alive now, unless that was done a moment ago."""
        start = time.monotonic()
        if start < self._due:
            return
        driver = psutil.Process()
        kinds = {driver.pid: "driver"}
        # A parent comes before its children, so the parent's kind is known.
        for process in driver.children(recursive=True):
            try:
                kinds[process.pid] = _kind(process.cmdline(), kinds.get(process.ppid(), OTHER))
            except psutil.Error:
                continue  # it has ended
        for pid, kind in kinds.items():
            peak = high_water_mb(pid)
            if peak is not None and kind != OTHER:
                self._peak[kind] = max(peak, self._peak.get(kind, 0.0))
        end = time.monotonic()
        self._due = end + (end - start) / SHARE

    def mb(self) -> dict[str, float]:
        """MB by kind: driver, model_worker, rollout, engine_core, environment, reward, ray."""
        return {kind: round(peak, 1) for kind, peak in sorted(self._peak.items())}


def _kind(command: list[str], parent: str) -> str:
    # Ray's worker processes carry their actor's class as title ("ray::ModelWorker.update"), and the raylet is their parent.
    title = " ".join(command)
    if any(part.startswith("megarl.environments.") for part in command):  # a worker, or a run of the Python tool
        return "environment"
    if parent in ("rollout", "engine_core"):
        return "engine_core"  # not by its title: a forked process keeps its parent's for a while
    if title.startswith(("ray::ModelWorker", "ray::SupervisedWorker")):
        return "model_worker"
    if title.startswith("ray::RolloutWorker"):
        return "rollout"
    if "megarl.rewards.worker" in title:
        return "reward"
    if parent == "ray" or title.startswith("ray::") or any(os.path.basename(command[0]) == daemon for daemon in RAY_DAEMONS if command):
        return "ray"
    if parent == "driver" and f"{os.sep}ray{os.sep}" in title:
        return "ray"  # its log monitor and other helpers, started by the driver
    return OTHER if parent == "driver" else parent


def high_water_mb(pid: int) -> float | None:
    """VmHWM of a process in MB; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (OSError, ProcessLookupError):
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return None  # a zombie has no memory
