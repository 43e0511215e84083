"""Breaks tiny RL runs at random moments, and shows that nothing of them is lost: a table of what was broken, seen and mended.

    python -m tools.chaos --faults 100 --seed 1 --out /tmp/chaos

Every run goes through its phases on the real stack while its processes are killed or stopped, or its disk is full or slow. What ends a run
is followed by the same command again, as a scheduler would. At its end a run's weights and metrics are compared with those of the run of
the same layout that nothing happened to; a difference is an error. The same seed breaks the same things in the same phases.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from tests.e2e.comparing import numbers, weights
from tests.e2e.job import EVERYTHING, ROOT, Job
from tests.e2e.kill_at import PHASES, Phase, Processes, done, title
from tools.make_tiny_model import build

STEPS, STILL_S, LIMIT_S = 24, 3, 300.0
LAYOUTS = {"one rank": (), "tp 2": ("layout={ranks: 2, tp: 2, ep: 2}",)}
COMMON = (*EVERYTHING, "sync.transport=gloo", f"train.steps={STEPS - 1}", f"cluster.still_timeout_s={STILL_S}", "cluster.restarts=1000")
PER_RUN = 6  # faults
FULL = 200_000  # bytes of a file that a full disk still takes: of a checkpoint's files none is so small
SLOW = "import os, time\nfsync = os.fsync\nos.fsync = lambda file: (time.sleep(0.2), fsync(file))[1]\n"  # of every process of a run
BEGUN, MENDED = re.compile(r"restart \d+ of cluster\.restarts="), re.compile(r"goes on after step (\d+): ")


@dataclass(frozen=True)
class Fault:
    """What is broken: a process by a signal, or the disk for a rank."""

    victim: str
    number: signal.Signals | None = None

    def __str__(self) -> str:
        return self.victim if self.number is None else f"{self.victim}, {self.number.name}"


PROCESSES = {"rank": "model rank", "actor": "rollout actor", "core": "vLLM core", "gcs_server": "GCS", "raylet": "raylet"}
FAULTS = (
    *(Fault(name, number) for name in PROCESSES for number in (signal.SIGKILL, signal.SIGSTOP)),
    Fault("driver", signal.SIGKILL),
    Fault("driver", signal.SIGTERM),
    Fault("reward worker", signal.SIGKILL),
    Fault("reward worker", signal.SIGSTOP),
    Fault("full disk"),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a fault; times in seconds from the moment of it."""

    fault: Fault
    phase: Phase
    seen: float | None  # None: nobody had to
    mended: float
    lost: int  # steps that were done again
    ended: bool  # the run had to be started again


def draw(count: int, random: np.random.Generator) -> Iterator[tuple[Fault, Phase]]:
    """Each fault as often as any other, and each phase."""
    faults: list[int] = []
    phases: list[int] = []
    for _ in range(count):
        faults = faults or random.permutation(len(FAULTS)).tolist()
        phases = phases or random.permutation(len(PHASES)).tolist()
        yield FAULTS[faults.pop()], PHASES[phases.pop()]


class Run:
    """One run that is broken again and again, and started again where that ends it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._start()

    def _start(self) -> None:
        self.job.start().wait_for("the engine", lambda: "sync ..." in self.job.text())

    def broken(self, fault: Fault, phase: Phase, wait: int) -> Outcome | None:
        """Waits for so many steps, and for the phase, breaks something and waits until the run goes on; None where it had ended before."""
        job, begin = self.job, done(self.job)
        if begin + wait >= STEPS - 1:
            return None
        job.wait_for("a step", lambda: done(job) >= begin + wait, 0.01)
        processes = Processes.of(job)
        job.wait_for(phase, lambda: phase in processes.phases(), 0.002)
        before, text = done(job), len(job.text())
        begun = time.monotonic()
        self._break(fault, processes)
        seen: float | None = None
        while job.process.poll() is None:
            news = job.text()[text:]
            now = time.monotonic() - begun
            if seen is None and BEGUN.search(news):
                seen = now
            if mended := MENDED.search(news):
                return Outcome(fault, phase, seen, now, before - int(mended[1]), ended=False)
            if fault.victim == "reward worker" and done(job) > before:
                return Outcome(fault, phase, None, now, 0, ended=False)
            assert now < LIMIT_S, f"{fault} in {phase}: nothing has happened:\n{news[-3000:]}"
            time.sleep(0.01)
        seen = time.monotonic() - begun
        assert job.process.returncode != 0 and job.gone(), f"{fault} in {phase}: ended with {job.process.returncode}:\n{job.text()[-3000:]}"
        self._start()
        rows = len(job.rows())
        job.wait_for("a row", lambda: len(job.rows()) > rows or done(job) > before, 0.01)
        kept = int(re.findall(r"step (\d+)/", job.text())[0]) - 1
        return Outcome(fault, phase, seen, time.monotonic() - begun, max(0, before - kept), ended=True)

    def _break(self, fault: Fault, processes: Processes) -> None:
        if fault.number is None:
            resource.prlimit(processes.rank, resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
            return
        if fault.victim in ("driver", "rank", "actor", "core"):
            pid = int(getattr(processes, fault.victim))
        elif fault.victim == "reward worker":  # in its sandbox, it has nothing of the job's environment
            below = psutil.Process(self.job.process.pid).children(recursive=True)
            pid = [one.pid for one in below if "megarl.rewards.worker" in title(one.pid)][-1]
        else:
            [pid] = [pid for pid in self.job.pids() if Path(title(pid).split("\0")[0]).name == fault.victim]
        os.kill(pid, fault.number)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Markdown: a row for each kind of fault; medians, and the largest in brackets."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[str(Fault(PROCESSES.get(outcome.fault.victim, outcome.fault.victim), outcome.fault.number))].append(outcome)
    yield "| fault | times | seen after, s | goes on after, s | steps done again | by |"
    yield "|---|---|---|---|---|---|"
    for name, rows in sorted(found.items()):
        seen = [row.seen for row in rows if row.seen is not None]
        by = "being started again" if any(row.ended for row in rows) else "a restart inside" if seen else "itself"
        times = [f"{median(values):.1f} ({max(values):.1f})" if values else "-" for values in (seen, [row.mended for row in rows])]
        yield f"| {name} | {len(rows)} | {times[0]} | {times[1]} | {max(row.lost for row in rows)} at most | {by} |"


def assert_same(job: Job, straight: Job) -> None:
    """Every row and the weights are those of the run that nothing happened to."""
    mine = [{name: value for name, value in row.items() if not name.startswith("events/restart")} for row in numbers(job)]
    assert mine == numbers(straight), f"{job.runs}: its metrics are not those of {straight.runs}"
    assert weights(job, "model", "critic") == weights(straight, "model", "critic"), f"{job.runs}: other weights than {straight.runs}"


def main() -> int:
    """Prints a line for every fault, and the table."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--faults", type=int, default=100)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--out", type=Path, required=True)
    given = asked.parse_args()
    random, out = np.random.default_rng(given.seed), given.out
    (out / "slow").mkdir(parents=True)
    (out / "slow" / "sitecustomize.py").write_text(SLOW)
    build(out / "model", layers=4, hidden=128, experts=8, expert_hidden=64, seed=1)
    straight = cache(lambda layout: Job(out / f"straight {layout}", out / "model", (*COMMON, *LAYOUTS[layout])).run())
    plan, outcomes, number = list(draw(given.faults, random)), list[Outcome](), 0
    try:
        while plan:
            number += 1
            layout, rolling, slow = list(LAYOUTS)[number % len(LAYOUTS)], ("off", "local")[number // 2 % 2], number % 3 == 0
            job = Job(out / f"{number:03d}", out / "model", (*COMMON, *LAYOUTS[layout], f"save.rolling={rolling}"))
            job.environment = {"PYTHONPATH": f"{out / 'slow'}:{ROOT}"} if slow else {}
            print(f"{number}: {layout}, save.rolling={rolling}{', every fsync takes 0.2 s' if slow else ''}", flush=True)
            for outcome in broken(job, plan, random):
                plan.pop(0)
                outcomes.append(outcome)
                seen = "" if outcome.seen is None else f"seen after {outcome.seen:.1f} s, "
                mended = f"goes on after {outcome.mended:.1f} s, {outcome.lost} steps done again"
                print(f"{number}: {outcome.fault} in {outcome.phase}: {seen}{mended}", flush=True)
            assert_same(job, straight(layout))
            print(f"{number}: the weights and {len(job.rows())} rows are those of the run that nothing happened to", flush=True)
    finally:
        print("\n".join(table(outcomes)))
    return 0


def broken(job: Job, plan: Sequence[tuple[Fault, Phase]], random: np.random.Generator) -> Iterator[Outcome]:
    """Runs a job to its end, and breaks it meanwhile: PER_RUN times at most, in what is first in the plan whenever it looks."""
    try:
        run = Run(job)
        for _ in range(PER_RUN):
            outcome = run.broken(*plan[0], int(random.integers(1, 3))) if plan else None
            if outcome is None:
                break
            yield outcome
        assert job.finish(LIMIT_S) == 0, job.text()[-3000:]
        assert job.gone(), "a process is left"
    finally:
        job.kill()


if __name__ == "__main__":
    sys.exit(main())
