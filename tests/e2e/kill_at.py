"""Kills a running job at a chosen moment, which shows from outside: Ray's actors carry the method they are in as their process title."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
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

Wait = Callable[[str, Callable[[], bool], float], None]  # what, until when, and how often (s) to look


def title(pid: int) -> str:
    """What a process calls itself."""
    return read(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace")


def titled(job: Job, start: str) -> list[int]:
    """The processes of a job whose title begins with `start`."""
    return [pid for pid in job.pids() if title(pid).startswith(start)]


def engine_processes(job: Job) -> list[tuple[int, int]]:
    """The actor of each engine and its core: a fork, which keeps the title of its parent, as do the workers that the core forks."""
    parents = {pid: parent_of(pid) for pid in titled(job, "ray::RolloutWorker")}
    return [(parent, pid) for pid, parent in parents.items() if parent in parents and parents[parent] not in parents]


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has ended."""
    [_, *after] = read(f"/proc/{pid}/status").split(b"\nPPid:\t")
    return int(after[0].split()[0]) if after else 0


@dataclass(frozen=True)
class Processes:
    """Those of a run with one engine, and one of its ranks."""

    driver: int
    rank: int
    actor: int
    core: int
    saves: Path

    @classmethod
    def of(cls, job: Job, rank: int = 0) -> Processes:
        """Those of the command line, once all of them are there, with the rank that was started as `rank`-th."""
        [(actor, core)] = engine_processes(job)
        return cls(job.process.pid, titled(job, "ray::ModelWorker")[rank], actor, core, job.saves)

    def unfinished(self) -> list[str]:
        """The saves that are being written."""
        return [path.name for path in self.saves.glob("step_*.partial")]

    def phases(self) -> set[Phase]:
        """Where the job is now. A save goes on behind the next phases' back."""
        method, found = title(self.rank).partition(".")[2], set[Phase]()
        if title(self.actor).endswith((".respond", ".go_on")):
            found.add("rollout")
        if method.startswith("update"):
            found.add("update")
        if method == "sync":
            found.add("sync")
        if self.unfinished():
            found.add("save")
        return found


@dataclass(frozen=True)
class Aim:
    """What is to be killed, in which phase, and not before which step is under way."""

    phase: Phase
    victim: Victim
    step: int

    def hit(self, job: Job, processes: Processes, wait: Wait, random: np.random.Generator) -> str:
        """Kills at a random moment inside the phase and says what was met. A moment that came too late is awaited anew.

        Args:
            job: whose metrics say which step is under way.
            processes: of its run.
            wait: raises where the run ends meanwhile.
            random: draws the moment.
        """
        pid = {"driver": processes.driver, "rank": processes.rank, "engine core": processes.core}[self.victim]
        wait(f"step {self.step}", lambda: done(job) >= self.step - 1, 0.02)
        for delay_s in pauses(random):
            wait(self.phase, lambda: self.phase in processes.phases(), 0.002)
            time.sleep(delay_s)
            met = processes.phases()
            if self.phase not in met:
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
