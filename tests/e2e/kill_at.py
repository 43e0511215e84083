"""Kills a running job at a chosen moment, which shows from outside: Ray's actors carry the method they are in as their process title."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tests.e2e.job import Job, read

Phase = Literal["rollout", "update", "save", "sync"]
Victim = Literal["driver", "rank", "engine core"]
PHASES: tuple[Phase, ...] = ("rollout", "update", "save", "sync")
VICTIMS: tuple[Victim, ...] = ("driver", "rank", "engine core")
TYPICAL_S = 0.15  # a phase of the tiny job


def title(pid: int) -> str:
    """What a process calls itself."""
    return read(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace")


def titled(job: Job, start: str) -> list[int]:
    """The processes of a job whose title begins with `start`."""
    return [pid for pid in job.pids() if title(pid).startswith(start)]


def engine_processes(job: Job) -> tuple[int, int]:
    """The actor of the one engine and its core, a fork that keeps the title of its parent."""
    pids = titled(job, "ray::RolloutWorker")
    [core] = [pid for pid in pids if any(f"\nPPid:\t{parent}\n".encode() in read(f"/proc/{pid}/status") for parent in pids)]
    [actor] = [pid for pid in pids if pid != core]
    return actor, core


@dataclass(frozen=True)
class Processes:
    """Those of a job with one engine, once all of them are there, and one of its ranks."""

    rank: int
    actor: int
    core: int
    saves: Path

    @classmethod
    def of(cls, job: Job, rank: int = 0) -> Processes:
        """With the rank that was started as `rank`-th."""
        return cls(titled(job, "ray::ModelWorker")[rank], *engine_processes(job), job.runs / "job" / "checkpoints")

    def unfinished(self) -> list[str]:
        """The saves that are being written."""
        return [path.name for path in self.saves.glob("step_*.partial")]

    def phases(self) -> set[Phase]:
        """Where the job is now. A save goes on behind the next phases' back."""
        rank, found = title(self.rank), set[Phase]()
        if title(self.actor) == "ray::RolloutWorker.respond":
            found.add("rollout")
        if rank.startswith("ray::ModelWorker.update"):
            found.add("update")
        if rank == "ray::ModelWorker.sync":
            found.add("sync")
        if self.unfinished():
            found.add("save")
        return found


@dataclass(frozen=True)
class Aim:
    """What is to be killed, in which phases at once, and not before which step is under way."""

    phases: frozenset[Phase]
    victim: Victim
    step: int

    def hit(self, job: Job, random: np.random.Generator) -> str:
        """Kills at a random moment inside the phases and says what was met. A moment that came too late is awaited anew."""
        job.wait_for("actors", lambda: "sync ..." in job.text())
        processes = Processes.of(job)
        pid = {"driver": job.process.pid, "rank": processes.rank, "engine core": processes.core}[self.victim]
        job.wait_for(f"step {self.step}", lambda: done(job) >= self.step - 1, pause_s=0.02)
        for delay_s in pauses(random):
            job.wait_for(" + ".join(self.phases), lambda: self.phases <= processes.phases(), pause_s=0.002)
            time.sleep(delay_s)
            met = processes.phases()
            if not self.phases <= met:
                continue
            os.kill(pid, signal.SIGKILL)
            step = done(job) + 1
            return f"{self.victim} in {' + '.join(sorted(met))} after {1000 * delay_s:.0f} ms, step {step} under way"
        raise AssertionError("pauses never end")


def pauses(random: np.random.Generator) -> Iterator[float]:
    """How long to wait after a phase was seen: less with every moment that was missed."""
    longest = TYPICAL_S
    while True:
        yield float(random.uniform(0, longest))
        longest /= 2


def done(job: Job) -> int:
    """The last step that the metrics have."""
    rows = job.updates()
    return int(rows[-1]["step"]) if rows else 0
