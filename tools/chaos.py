"""Break tiny RL runs at random moments and show that nothing is lost: prints a table of what was broken, detected and recovered.

    python -m tools.chaos --faults 100 --out /tmp/chaos

Every run goes through its phases on the real stack while its processes are killed, stopped or asked to end, or its disk is full or slow.
If a fault ends the run, the same command is started again, as a scheduler would. At the end, a run's weights and metrics are compared with
those of an undisturbed run with the same layout; a difference is an error. The seed is a new one each time, and printed: given again, it
breaks the same things in the same phases.

Needs root, for the disk. With --write, what a whole run of the tool has shown goes into megarl/cluster/figures.md.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cache
from itertools import product, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from tests.e2e.comparing import numbers, weights
from tests.e2e.job import EVERYTHING, ROOT, Job
from tests.e2e.kill_at import PHASES, Phase, Processes, done, title
from tools.faulty_disk import SPEED, FaultyDisk, missing, mount_for_this_process_alone
from tools.make_tiny_model import build

STEPS, STILL_S, LIMIT_S = 40, 3, 900.0  # the last is the time after which a run counts as hung
LAYOUTS = {"one rank": (), "tp 2": ("layout={ranks: 2, tp: 2, ep: 2}",)}
AHEAD = ("algorithm={type: ppo, kl_coef: 0.05, kl_target: 0.1, correction: {type: tis}}", "rollout.mode=ahead")
MODES = {"sync": (), "ahead": AHEAD}
COMMON = (*EVERYTHING, "sync.transport=gloo", f"train.steps={STEPS - 1}", f"cluster.stall_timeout_s={STILL_S}", "cluster.restarts=1000")
PER_RUN = 12  # most faults of a run
PAUSE_S = 3 * STILL_S  # how long the driver is stopped, and the disk hangs
PAGE = ROOT / "megarl" / "cluster" / "figures.md"
BEGIN, END = "<!-- written by tools/chaos.py -->", "<!-- end of the table -->"
BEGUN, MENDED = re.compile(r"restart \d+ of at most \d+ per day"), re.compile(r"resumed after step (\d+): ")
STEP = re.compile(r"step (\d+)/")
SEED = re.compile(r"\| \d+ \| \d+ \| \d+ \| ")  # a row of the table of seeds
LAST = (
    f"The last of these seeds (`cluster.stall_timeout_s={STILL_S}`, `save.every=1`, a slow disk takes {SPEED / 1e6:g} MB/s, a hanging one "
    f"hangs for {PAUSE_S} s); medians, the largest in brackets:"
)


@dataclass(frozen=True)
class Fault:
    """What is broken: a process, or every one, by a signal, or the disk of the run's directory."""

    victim: str
    number: signal.Signals | None = None

    def __str__(self) -> str:
        return self.victim if self.number is None else f"{self.victim}, {self.number.name}"


WORKER = "reward worker"
EVERYBODY = "every process"  # as Slurm warns the steps of a job that it preempts
GRACE_S = 60  # for a warned run to save itself and end
SAVED = re.compile(r"stopped by SIGTERM: saved at step \d+; started again, the run resumes")
PROCESSES = {"rank": "model rank", "actor": "rollout actor", "core": "vLLM core", "gcs_server": "GCS", "raylet": "raylet"}
FAULTS = (
    *(Fault(name, number) for name in PROCESSES for number in (signal.SIGKILL, signal.SIGSTOP)),
    Fault("driver", signal.SIGKILL),
    Fault("driver", signal.SIGTERM),
    Fault("driver", signal.SIGSTOP),
    Fault(EVERYBODY, signal.SIGTERM),
    Fault(WORKER, signal.SIGKILL),
    Fault(WORKER, signal.SIGSTOP),
    Fault("full disk"),
    Fault("slow disk"),
    Fault("hanging disk"),
)
# These need no recovery: a run waits for the disk, and for a driver that continues after PAUSE_S, and replaces a reward worker in passing.
DISKS = (Fault("slow disk"), Fault("hanging disk"))
HARMLESS = (Fault("driver", signal.SIGSTOP), Fault(WORKER, signal.SIGKILL), Fault(WORKER, signal.SIGSTOP), *DISKS)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault; times in seconds since the fault."""

    fault: Fault
    phase: Phase
    seen: float | None  # when it was detected; None: it did not have to be
    mended: float
    lost: int  # steps that were repeated
    ended: str = ""  # the run's last line, if it had to be started again


def draw(count: int, random: np.random.Generator) -> Iterator[tuple[Fault, Phase]]:
    """Yield each fault as often as any other, and each phase likewise."""
    faults: list[int] = []
    phases: list[int] = []
    for _ in range(count):
        faults = faults or random.permutation(len(FAULTS)).tolist()
        phases = phases or random.permutation(len(PHASES)).tolist()
        yield FAULTS[faults.pop()], PHASES[phases.pop()]


class Run:
    """One run that is broken again and again, and restarted whenever that ends it."""

    def __init__(self, job: Job, disk: FaultyDisk) -> None:
        self.job, self._disk, self._warned = job, disk, list[int]()
        self._start()

    def _start(self) -> None:
        self.job.start().wait_for("the engine", lambda: "sync ..." in self.job.text())

    def broken(self, fault: Fault, phase: Phase, wait: int) -> Outcome | None:
        """Wait for `wait` steps and for the phase, break something, and wait until the run goes on; None if the run is too near its end."""
        job, begin = self.job, done(self.job)
        if begin + wait > STEPS - 5:  # recovery must be complete by the end
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
                return Outcome(fault, phase, seen, now, before - int(mended[1]))
            if fault in HARMLESS and done(job) > before + 1:  # a step that began after the fault
                return Outcome(fault, phase, None, now, 0)
            assert now < LIMIT_S, f"{fault} in {phase}: nothing has happened:\n{news[-3000:]}"
            time.sleep(0.01)
        seen = time.monotonic() - begun
        assert job.process.returncode != 0 and job.gone(), f"{fault} in {phase}: ended with {job.process.returncode}:\n{job.text()[-3000:]}"
        graceful = fault.number == signal.SIGTERM
        if graceful:
            saved = SAVED.search(job.text(), text) and job.process.returncode == 143 and seen <= GRACE_S
            assert saved, f"{fault} in {phase}: ended with {job.process.returncode} after {seen:.1f} s:\n{job.text()[-3000:]}"
            assert not (left := [one for pid in self._warned if (one := title(pid))]), f"{fault} in {phase}: left {left}"
        self._disk.mend()
        last = (job.text().splitlines() or ["nothing"])[-1]
        self._start()
        job.wait_for("a step", lambda: STEP.search(job.text()) is not None, 0.01)
        kept = int(STEP.findall(job.text())[0]) - 1
        assert kept >= before or not graceful, f"{fault} in {phase}: {before} steps were done, and {kept} kept"
        return Outcome(fault, phase, seen, time.monotonic() - begun, max(0, before - kept), last)

    def _break(self, fault: Fault, processes: Processes) -> None:
        if fault.number is None:
            {"full disk": self._disk.fill, "slow disk": self._disk.slow_down, "hanging disk": self._disk.freeze}[fault.victim]()
            if fault.victim == "hanging disk":
                time.sleep(PAUSE_S)
                self._disk.thaw()
            return
        if fault.victim == EVERYBODY:
            below = [one.pid for one in psutil.Process(processes.driver).children(recursive=True)]  # those in sandboxes lack the job's mark
            self._warned = sorted({*below, *self.job.pids()}, reverse=True)  # the driver, which acts on it, is the last to hear
            for number, pid in product((signal.SIGCONT, fault.number), self._warned):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            return
        if fault.victim in ("driver", "rank", "actor", "core"):
            pid = int(getattr(processes, fault.victim))
        elif fault.victim == WORKER:  # in its sandbox, it lacks the job's environment
            below = psutil.Process(self.job.process.pid).children(recursive=True)
            pid = [one.pid for one in below if "megarl.rewards.worker" in title(one.pid)][-1]
        else:
            [pid] = [pid for pid in self.job.pids() if Path(title(pid).split("\0")[0]).name == fault.victim]
        os.kill(pid, fault.number)
        if fault == Fault("driver", signal.SIGSTOP):
            time.sleep(PAUSE_S)
            os.kill(pid, signal.SIGCONT)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a Markdown table with a row for each kind of fault: medians, and the largest in brackets."""
    outcomes_of: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        outcomes_of[str(Fault(PROCESSES.get(outcome.fault.victim, outcome.fault.victim), outcome.fault.number))].append(outcome)
    yield "| fault | times | detected (s) | resumed (s) | steps repeated | by |"
    yield "|---|---|---|---|---|---|"
    for name, rows in sorted(outcomes_of.items()):
        seen = [row.seen for row in rows if row.seen is not None]
        by = "being started again" if any(row.ended for row in rows) else "a restart inside" if seen else "itself"
        times = [f"{median(values):.1f} ({max(values):.1f})" if values else "-" for values in (seen, [row.mended for row in rows])]
        yield f"| {name} | {len(rows)} | {times[0]} | {times[1]} | {max(row.lost for row in rows)} at most | {by} |"


def assert_same(job: Job, straight: Job) -> None:
    """Assert that every row and the weights are those of the undisturbed run."""
    for row, other in zip_longest(numbers(job), numbers(straight), fillvalue=dict[str, Any]()):
        different = {name: (row.get(name), other.get(name)) for name in row | other if row.get(name) != other.get(name)}
        assert not different, f"{job.runs}: not the metrics of {straight.runs} in step {row.get('step')}: {different}"
    assert weights(job, "model", "critic") == weights(straight, "model", "critic"), f"{job.runs}: other weights than {straight.runs}"


def main() -> int:
    """Print a line for every fault, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of an earlier run; by default a new one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="put the tables into megarl/cluster/figures.md")
    given = parser.parse_args()
    if why := missing():
        parser.error(why)
    print(f"seed {given.seed}", flush=True)
    mount_for_this_process_alone()
    random, out = np.random.default_rng(given.seed), given.out
    out.mkdir(parents=True)
    build(out / "model", layers=4, hidden=128, experts=8, expert_hidden=64, seed=1)

    @cache
    def straight(layout: str, mode: str) -> Job:
        return Job(out / f"straight {layout} {mode}", out / "model", (*COMMON, *LAYOUTS[layout], *MODES[mode])).run()

    combinations = list(product(LAYOUTS, MODES, ("off", "local")))
    random.shuffle(combinations)
    plan, outcomes, loads, number = list(draw(given.faults, random)), list[Outcome](), list[float](), 0
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    try:
        while plan:
            number += 1
            layout, mode, rolling = combinations[number % len(combinations)]
            job = Job(out / f"{number:03d}", out / "model", (*COMMON, *LAYOUTS[layout], *MODES[mode], f"save.rolling={rolling}"))
            print(f"{number}: {layout}, rollout.mode={mode}, save.rolling={rolling}", flush=True)
            disk = FaultyDisk(job.runs / "job")
            try:
                for outcome in broken(job, disk, plan, random):
                    plan.pop(0)
                    outcomes.append(outcome)
                    loads.append(os.getloadavg()[0])
                    seen = "" if outcome.seen is None else f"detected after {outcome.seen:.1f} s, "
                    mended = f"resumed after {outcome.mended:.1f} s, {outcome.lost} steps repeated"
                    ended = f", after it had ended with: {outcome.ended}" if outcome.ended else ""
                    print(f"{number}: {outcome.fault} in {outcome.phase}: {seen}{mended}{ended}", flush=True)
                assert_same(job, straight(layout, mode))
            finally:
                disk.close()
            disk.image.unlink()
            print(f"{number}: the weights and rows are those of the run that nothing happened to", flush=True)
    finally:
        print("\n".join(table(outcomes)), f"{len(outcomes)} of {given.faults} faults, seed {given.seed}", sep="\n", flush=True)
    if given.write:
        seed = f"| {given.seed} | {len(outcomes)} | {number} | {date.today()}, {commit} | {min(loads):.0f} to {max(loads):.0f} |"
        PAGE.write_text(written(PAGE.read_text(), seed, list(table(outcomes))))
    return 0


def written(page: str, seed: str, rows: Sequence[str]) -> str:
    """Return the page with the table of the last seed's faults, and a row for each seed."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    seeds = [line for line in old.splitlines() if SEED.match(line)]
    heads = ["| seed | faults | runs | date, commit | load |", "|---|---|---|---|---|"]
    return "\n".join([before + BEGIN, *heads, *seeds, seed, "", LAST, "", *rows, "", END]) + after


def broken(job: Job, disk: FaultyDisk, plan: Sequence[tuple[Fault, Phase]], random: np.random.Generator) -> Iterator[Outcome]:
    """Run a job to its end, breaking it up to PER_RUN times on the way, each time with the fault that is then first in the plan."""
    try:
        run = Run(job, disk)
        for _ in range(PER_RUN):
            outcome = run.broken(*plan[0], int(random.integers(1, 3))) if plan else None
            if outcome is None:
                break
            disk.mend()
            yield outcome
        assert job.finish(LIMIT_S) == 0, job.text()[-3000:]
        assert job.gone(), "a process is left"
    finally:
        job.kill()


if __name__ == "__main__":
    sys.exit(main())
