"""What a signal to any process of a job does that replaces nothing (`cluster.restarts=0`).

Exit status, line, seconds, nothing left, and a run that goes on bit for bit. And two cases of what a run replaces.

    .venv/bin/python -m pytest tests/e2e/test_faults.py --long

In the suite's own time the same is shown of a few: kills in test_kills.py, Ctrl-C in test_job.py, stopped ranks in test_watch.py.
What else a run replaces: test_kills.py, test_engines.py, tools/chaos.py.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.comparing import assert_same
from tests.e2e.job import EVERYTHING, Job
from tests.e2e.kill_at import PHASES, Aim, Phase, Processes, Victim, done, title
from tests.e2e.lab import Lab

SEED = 12
STILL_S = 3
LONG = "train.steps=60"  # for what nobody waits for: a run may be done before its GCS, or its raylet, has been stopped for STILL_S
LIMIT_S = 90.0  # from the signal to the end: twice what the slowest took on two cores
LAYOUTS = {
    "one": (),
    "tp2": ("layout={ranks: 2, tp: 2, ep: 2}", "sync.transport=gloo"),
    "pp2": ("layout={ranks: 2, pp: 2}", "sync.transport=gloo"),  # two ranks send
    "shared": ("placement.engines=shared",),
    "pp2-shared": ("layout={ranks: 2, pp: 2}", "placement.engines=shared", "rollout.tp=2"),  # a worker of the engine relays what each sends
}


@dataclass(frozen=True)
class Fault:
    """A signal to a process, and how the job ends: its status, and the line that says why."""

    victim: str
    number: signal.Signals
    status: int
    line: str

    @property
    def name(self) -> str:
        return f"{self.victim}-{self.number.name}"


STILL = r"StandsStill: [\w ]+: {}.*has been stopped by a signal for \d+ s"
FAULTS = (
    Fault("driver", signal.SIGKILL, -9, ""),
    Fault("driver", signal.SIGTERM, 143, r"stopped by SIGTERM: saved at step \d+; started again, the run resumes"),
    Fault("driver", signal.SIGHUP, 129, r"stopped by SIGHUP: saved at step \d+; started again, the run resumes"),
    Fault("driver", signal.SIGINT, 130, r"interrupted"),
    Fault("rank", signal.SIGKILL, 1, r"WorkerDied: [\w ]+: rank \d died"),
    Fault("rank", signal.SIGSTOP, 1, STILL.format(r"(rank \d: )?ray::ModelWorker")),
    Fault("actor", signal.SIGKILL, 1, r"(WorkerDied|EngineDead): .*engine 0"),
    Fault("actor", signal.SIGSTOP, 1, STILL.format(r"(engine 0: )?ray::RolloutWorker")),
    Fault("core", signal.SIGKILL, 1, r"EngineDead: .*engine 0"),
    Fault("core", signal.SIGSTOP, 1, STILL.format(r"(engine 0: )?ray::RolloutWorker")),
    Fault("gcs_server", signal.SIGKILL, 1, r"StandsStill: [\w ]+: Ray's gcs_server has ended"),
    Fault("gcs_server", signal.SIGSTOP, 1, STILL.format(r".*gcs_server")),
    Fault("raylet", signal.SIGKILL, 1, r"StandsStill: [\w ]+: Ray's raylet has ended|WorkerDied: "),
    Fault("raylet", signal.SIGSTOP, 1, STILL.format(r".*raylet")),
)


def chosen() -> list[tuple[str, Fault, Phase]]:
    """Each fault in two phases with one rank, and in one with two; over all of them, each phase as often as any other."""
    random = np.random.default_rng(SEED)
    cases = [(layout, fault) for layout, times in (("one", 2), ("tp2", 1)) for fault in FAULTS for _ in range(times)]
    phases: list[Phase] = []
    while len(phases) < len(cases):
        phases += [PHASES[n] for n in random.permutation(len(PHASES))]
    return [(layout, fault, phase) for (layout, fault), phase in zip(cases, phases, strict=False)]


@pytest.fixture(scope="module")
def straight(lab: Lab, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., Job]:
    """The run of a layout that nothing happens to."""
    runs = tmp_path_factory.mktemp("straight")

    def run(name: str, *more: str) -> Job:
        job = Job(runs / "-".join((name, *more)), tiny_model, (*EVERYTHING, *LAYOUTS[name], *more))
        return job.run() if "rollout.tp=2" in LAYOUTS[name] else lab.run(job)  # the lab's engine has one worker

    return cache(run)


def pid_of(job: Job, victim: str, processes: Processes) -> int:
    if victim == "driver":
        return job.process.pid
    if victim in ("rank", "actor", "core"):
        return int(getattr(processes, victim))
    [pid] = [pid for pid in job.pids() if Path(title(pid).split("\0")[0]).name == victim]
    return pid


@pytest.mark.long
@pytest.mark.parametrize(("layout", "fault", "phase"), chosen(), ids=lambda part: getattr(part, "name", part))
def test_a_signal_to_any_process(
    layout: str, fault: Fault, phase: Phase, lab: Lab, straight: Callable[..., Job], tmp_path: Path, tiny_model: Path
) -> None:
    random = np.random.default_rng([SEED, chosen().index((layout, fault, phase))])
    more = (LONG,) if fault.number == signal.SIGSTOP and fault.victim in ("gcs_server", "raylet") else ()
    settings = (*EVERYTHING, *LAYOUTS[layout], *more, f"cluster.still_timeout_s={STILL_S}", "cluster.restarts=0")
    job = Job(tmp_path, tiny_model, settings).start()
    try:
        job.wait_for("the engine", lambda: "sync ..." in job.text())
        processes = Processes.of(job, int(random.integers(2)) if layout == "tp2" else 0)
        pid = pid_of(job, fault.victim, processes)
        step = int(random.integers(2, 8))
        job.wait_for(f"step {step}", lambda: done(job) >= step - 1, pause_s=0.02)
        job.wait_for(phase, lambda: phase in processes.phases(), pause_s=0.002)
        os.kill(pid, fault.number)
        begun = time.monotonic()
        assert job.finish(LIMIT_S) == fault.status, job.text()[-3000:]
        seconds = time.monotonic() - begun
        assert job.gone()
    finally:
        job.kill()
    last = [line for line in job.text().splitlines() if line.startswith("megarl: ")][-1:]
    assert re.search(fault.line, "".join(last)), job.text()[-3000:]
    print(f"{layout}: {fault.name} in {phase}: {fault.status} after {seconds:.1f} s: {''.join(last)[:120]}")
    lab.run(job)
    assert_same(job, straight(layout, *more), "model", "critic")


@pytest.mark.long
def test_sigterm_while_ranks_start_again(lab: Lab, straight: Callable[[str], Job], tmp_path: Path, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model, EVERYTHING).start()
    try:
        job.wait_for("step 2", lambda: done(job) >= 2, pause_s=0.02)
        os.kill(Processes.of(job).rank, signal.SIGKILL)
        job.wait_for("its recovery", lambda: "restart 1 of at most " in job.text(), pause_s=0.02)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish(LIMIT_S) == 143, job.text()[-3000:]
        assert "resumed after" not in job.text() and job.gone()
    finally:
        job.kill()
    lab.run(job)
    assert_same(job, straight("one"), "model", "critic")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["one", "tp2"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.victim in ("gcs_server", "raylet")], ids=lambda fault: fault.name)
def test_ray_is_lost_while_ranks_start_again(
    layout: str, fault: Fault, lab: Lab, straight: Callable[[str], Job], tmp_path: Path, tiny_model: Path
) -> None:
    """Whatever the recovery is asking Ray for just then."""
    settings = (*EVERYTHING, *LAYOUTS[layout], f"cluster.still_timeout_s={STILL_S}")
    job = Job(tmp_path, tiny_model, settings).start()
    try:
        job.wait_for("step 2", lambda: done(job) >= 2, pause_s=0.02)
        processes = Processes.of(job)
        pid = pid_of(job, fault.victim, processes)
        os.kill(processes.rank, signal.SIGKILL)
        job.wait_for("its recovery", lambda: "restart 1 of at most " in job.text(), pause_s=0.005)
        os.kill(pid, fault.number)
        begun = time.monotonic()
        assert job.finish(LIMIT_S) == 1, job.text()[-3000:]
        seconds = time.monotonic() - begun
        assert job.gone()
    finally:
        job.kill()
    last = [line for line in job.text().splitlines() if line.startswith("megarl: ")][-1:]
    assert re.search(fault.line, "".join(last)), job.text()[-3000:]
    print(f"{layout}: {fault.name} in a recovery: 1 after {seconds:.1f} s: {''.join(last)[:120]}")
    lab.run(job)
    assert_same(job, straight(layout), "model", "critic")


@pytest.mark.long
def test_an_engine_that_shares_devices_with_the_ranks_is_replaced(
    lab: Lab, straight: Callable[[str], Job], tmp_path: Path, tiny_model: Path
) -> None:
    """While it answers, while it sleeps, and while it gets weights."""
    phases: tuple[Phase, ...] = ("rollout", "update", "sync")
    random = np.random.default_rng(SEED)
    job = Job(tmp_path, tiny_model, (*EVERYTHING, *LAYOUTS["shared"])).start()
    try:
        job.wait_for("the engine", lambda: "sync ..." in job.text())
        for number, phase in enumerate(phases):
            Aim(phase, "engine core", 2 + 2 * number).hit(job, Processes.of(job), job.wait_for, random)
            job.wait_for("its recovery", lambda: job.text().count(": resumed after step ") > number)  # noqa: B023
        assert job.finish() == 0 and job.gone(), job.text()[-3000:]
    finally:
        job.kill()
    assert [row["events/restart/engine"] for row in job.rows() if "events/restart" in row] == [1.0] * len(phases)
    assert_same(job, straight("shared"), "model", "critic")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["pp2", "pp2-shared"])
def test_a_process_is_replaced_that_dies_while_two_ranks_send(
    lab: Lab, straight: Callable[[str], Job], tmp_path: Path, tiny_model: Path, layout: str
) -> None:
    """The engine, then the first sender, then the second."""
    victims: tuple[tuple[Victim, int], ...] = (("engine core", 0), ("rank", 0), ("rank", 1))
    random = np.random.default_rng(SEED)
    job = Job(tmp_path, tiny_model, (*EVERYTHING, *LAYOUTS[layout])).start()
    try:
        job.wait_for("the engine", lambda: "sync ..." in job.text())
        for number, (victim, rank) in enumerate(victims):
            Aim("sync", victim, 2 + 2 * number).hit(job, Processes.of(job, rank), job.wait_for, random)
            job.wait_for("its recovery", lambda: job.text().count(": resumed after step ") > number)  # noqa: B023
        assert job.finish() == 0 and job.gone(), job.text()[-3000:]
    finally:
        job.kill()
    assert job.text().count(": resumed after step ") == len(victims)
    assert_same(job, straight(layout), "model", "critic")
