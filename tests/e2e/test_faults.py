"""What a signal to any process of a job does that replaces nothing (`cluster.restarts=0`).

Exit status, line, seconds, nothing left, and a run that goes on bit for bit. And two cases of what a run replaces.

    .venv/bin/python -m pytest tests/e2e/test_faults.py --long

In the suite's own time the same is shown of a few: kills in test_kills.py, Ctrl-C in test_job.py, stopped ranks in test_watch.py.
What else a run replaces: test_kills.py, test_engines.py, tools/chaos.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.host.reaper import SILENT
from tests.e2e.comparing import assert_same
from tests.e2e.job import EVERYTHING, ROOT, Job
from tests.e2e.kill_at import PHASES, Aim, Phase, Processes, Victim, done, title
from tests.e2e.lab import Lab
from tests.unit.cluster.nodes import LOCAL

SEED = 12
STILL_S = 3
SLOW = "reward.source.path=tests.slurm.slow:share_of_letters"  # otherwise a run may be done before what is stopped has been so for STILL_S
LIMIT_S = 90.0  # from the signal to the end: twice what the slowest took on two cores
OLD_WEIGHTS = ("algorithm={type: ppo, kl_coef: 0.05, kl_target: 0.1, correction: {type: tis}}",)  # have sampled what a step learns from
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "tp2": ("layout={ranks: 2, tp: 2, ep: 2}", "sync.transport=gloo"),
    "pp2": ("layout={ranks: 2, pp: 2}", "sync.transport=gloo"),  # two ranks send
    "shared": ("placement.engines=shared",),
    "pp2-shared": ("layout={ranks: 2, pp: 2}", "placement.engines=shared", "rollout.tp=2"),  # a worker of the engine relays what each sends
    "ahead": (*OLD_WEIGHTS, "rollout.mode=ahead"),
    "free": (*OLD_WEIGHTS, "rollout.mode=free", "rollout.max_lag=2", "train.dynamic_sampling_rounds=null"),
}
OWN = ("gcs_server", "raylet")  # Ray's own processes: a run that loses one is over


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


STILL = r"(ProcessStalled|WorkerDied): [\w ]+: {}.*has been stopped by a signal for \d+ s"
RAY_ENDS = f"|failed: {SILENT}"  # where the driver calls it before the watch has looked
FAULTS = (
    Fault("driver", signal.SIGKILL, -9, f"failed: {SILENT}"),
    Fault("driver", signal.SIGTERM, 143, r"stopped by SIGTERM: saved at step \d+; started again, the run resumes"),
    Fault("driver", signal.SIGHUP, 129, r"stopped by SIGHUP: saved at step \d+; started again, the run resumes"),
    Fault("driver", signal.SIGINT, 130, r"interrupted"),
    Fault("rank", signal.SIGKILL, 1, r"WorkerDied: [\w ]+: rank \d died"),
    Fault("rank", signal.SIGSTOP, 1, STILL.format(r"(rank \d: )?ray::ModelWorker")),
    Fault("actor", signal.SIGKILL, 1, r"(WorkerDied|EngineDead): .*engine 0"),
    Fault("actor", signal.SIGSTOP, 1, STILL.format(r"(engine 0: )?ray::RolloutWorker")),
    Fault("core", signal.SIGKILL, 1, r"(WorkerDied|EngineDead): .*engine 0"),
    Fault("core", signal.SIGSTOP, 1, STILL.format(r"(engine 0: )?ray::RolloutWorker")),
    Fault("gcs_server", signal.SIGKILL, 1, r"ProcessStalled: [\w ]+: Ray's gcs_server has ended" + RAY_ENDS),
    Fault("gcs_server", signal.SIGSTOP, 1, STILL.format(r".*gcs_server")),
    Fault("raylet", signal.SIGKILL, 1, r"ProcessStalled: [\w ]+: Ray's raylet has ended|WorkerDied: " + RAY_ENDS),
    Fault("raylet", signal.SIGSTOP, 1, STILL.format(r".*raylet")),
)


def chosen() -> list[tuple[str, Fault, Phase]]:
    """Each fault in two phases with one rank, and in one with two and in each mode; over all of them, each phase as often as any other."""
    random = np.random.default_rng(SEED)
    cases = [(layout, fault) for layout, times in (("one", 2), ("tp2", 1)) for fault in FAULTS for _ in range(times)]
    cases += [(mode, fault) for mode in ("ahead", "free") for fault in FAULTS if fault.victim != "driver"]
    phases: list[Phase] = []
    while len(phases) < len(cases):
        phases += [PHASES[n] for n in random.permutation(len(PHASES))]
    return [(layout, fault, phase) for (layout, fault), phase in zip(cases, phases, strict=False)]


@pytest.fixture(scope="module")
def straight(lab: Lab, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], Job]:
    """The run of a layout that nothing happens to."""
    runs = tmp_path_factory.mktemp("straight")

    def run(name: str) -> Job:
        job = Job(runs / name, tiny_model, (*EVERYTHING, *LAYOUTS[name]))
        return job.run() if "rollout.tp=2" in LAYOUTS[name] else lab.run(job)  # the lab's engine has one worker

    return cache(run)


class Guest(Job):
    """A job in a Ray cluster that was there before it: of its processes, this one starts the driver alone."""

    cluster: subprocess.Popen[str]

    @contextmanager
    def joined(self) -> Iterator[Guest]:
        """Start the cluster, and the job in it; end both."""
        scratch = tempfile.mkdtemp(prefix="mc-")  # short: Ray's sockets live below it
        command = [sys.executable, "-m", "tests.unit.cluster.nodes", "disabled", scratch, "0"]
        environment = {**os.environ, **LOCAL, "PYTHONPATH": str(ROOT), "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as self.cluster:
            assert self.cluster.stdout is not None
            self.overrides += (f"cluster.address={self.cluster.stdout.readline().strip()}", "cluster.interface=lo")
            try:
                self.start()
                yield self
            finally:
                for process in [*psutil.Process(self.cluster.pid).children(recursive=True), self.cluster, self.process]:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                self.cluster.wait()
                shutil.rmtree(scratch, ignore_errors=True)

    def pids(self) -> list[int]:
        """The driver, Ray's own processes, and those of the run."""
        below = [one.pid for one in psutil.Process(self.cluster.pid).children(recursive=True)]
        return [pid for pid in (*super().pids(), *below) if not title(pid).startswith("ray::IDLE")]

    def gone(self, within_s: float = 120) -> bool:
        """Whether the run has left nothing: of the cluster's processes, only Ray's own remain."""
        deadline = time.monotonic() + within_s
        while (left := [pid for pid in self.pids() if title(pid).startswith("ray::")]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return not left and self.process.poll() is not None


def pid_of(job: Job, victim: str, processes: Processes) -> int:
    if victim == "driver":
        return job.process.pid
    if victim in ("rank", "actor", "core"):
        return int(getattr(processes, victim))
    [pid] = [pid for pid in job.pids() if Path(title(pid).split("\0")[0]).name == victim]
    return pid


def assert_ends(job: Job, pid: int, fault: Fault, when: str) -> None:
    """Send the signal. The job ends with the status and the line of the fault, and leaves nothing behind."""
    os.kill(pid, fault.number)
    begun = time.monotonic()
    assert job.finish(LIMIT_S) == fault.status, job.text()[-3000:]
    seconds = time.monotonic() - begun
    assert job.gone()
    last = [line for line in job.text().splitlines() if line.startswith("megarl: ")][-1:]
    assert re.search(fault.line, "".join(last)), job.text()[-3000:]
    print(f"{fault.name} {when}: {fault.status} after {seconds:.1f} s: {''.join(last)[:120]}")


def assert_whole(job: Job, layout: str, straight: Callable[[str], Job]) -> None:
    """The job, started again, has come to the end of the run that nothing happened to: bit for bit, unless its engines never wait."""
    if layout != "free":
        assert_same(job, straight(layout), "model", "critic")
        return
    rows = job.steps()
    assert [row["step"] for row in rows] == list(range(rows[0]["step"], rows[0]["step"] + len(rows)))
    assert rows[-1]["step"] == int(job.rows()[-1]["step"]) and all(row["rollout/lag_max"] <= 2 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "fault", "phase"), chosen(), ids=lambda part: getattr(part, "name", part))
def test_a_signal_to_any_process(
    layout: str, fault: Fault, phase: Phase, lab: Lab, straight: Callable[[str], Job], tmp_path: Path, tiny_model: Path
) -> None:
    random = np.random.default_rng([SEED, chosen().index((layout, fault, phase))])
    slow = fault.number == signal.SIGSTOP and fault.victim in OWN  # for which nobody waits
    overrides = (*EVERYTHING, *LAYOUTS[layout], f"cluster.stall_timeout_s={STILL_S}", "cluster.restarts=0")
    job = Job(tmp_path, tiny_model, (*overrides, SLOW) if slow else overrides).start()
    try:
        job.wait_for("the engine", lambda: "sync ..." in job.text())
        processes = Processes.of(job, int(random.integers(2)) if layout == "tp2" else 0)
        pid = pid_of(job, fault.victim, processes)
        step = int(random.integers(2, 4 if slow else 8))
        job.wait_for(f"step {step}", lambda: done(job) >= step - 1, pause_s=0.02)
        job.wait_for(phase, lambda: phase in processes.phases(), pause_s=0.002)
        assert_ends(job, pid, fault, f"in {phase}, {layout}")
    finally:
        job.kill()
    lab.run(job, own_engine=layout == "free")
    assert_whole(job, layout, straight)


SILENT = r"ProcessStalled: [\w ]+: Ray's server has not answered for \d+ s"
RAYLET = r"ProcessStalled: [\w ]+: Ray's raylet on this machine "
# Of a cluster that others have started, a run sees what serves it there.
JOINED = (
    *(fault for fault in FAULTS if fault.victim in ("rank", "actor", "core")),
    *(Fault("gcs_server", number, 1, SILENT) for number in (signal.SIGKILL, signal.SIGSTOP)),
    Fault("raylet", signal.SIGKILL, 1, RAYLET + "has ended"),
    Fault("raylet", signal.SIGSTOP, 1, RAYLET + r"\(pid \d+\) has been stopped by a signal for \d+ s"),
)


@pytest.mark.long
@pytest.mark.parametrize("fault", JOINED, ids=lambda fault: fault.name)
def test_a_signal_to_a_process_of_a_run_on_a_cluster_of_others(
    fault: Fault, lab: Lab, straight: Callable[[str], Job], tmp_path: Path, tiny_model: Path
) -> None:
    """Which the run has joined: what it loses there is named, and its own processes end."""
    slow = (SLOW,) if fault.victim in OWN else ()
    settings = (*EVERYTHING, *slow, f"cluster.stall_timeout_s={STILL_S}", "cluster.restarts=0")
    with Guest(tmp_path, tiny_model, settings, foreign={}).joined() as guest:
        guest.wait_for("the engine", lambda: "sync ..." in guest.text())
        pid = pid_of(guest, fault.victim, Processes.of(guest))
        guest.wait_for("step 3", lambda: done(guest) >= 3, pause_s=0.02)
        assert_ends(guest, pid, fault, "in a cluster of others")
    job = lab.run(Job(tmp_path, tiny_model, settings))
    assert_whole(job, "one", straight)


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
@pytest.mark.parametrize("layout", ["one", "tp2", "ahead"])
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.victim in OWN], ids=lambda fault: fault.name)
def test_ray_is_lost_while_ranks_start_again(
    layout: str, fault: Fault, lab: Lab, straight: Callable[[str], Job], tmp_path: Path, tiny_model: Path
) -> None:
    """Whatever the recovery is asking Ray for just then."""
    settings = (*EVERYTHING, *LAYOUTS[layout], f"cluster.stall_timeout_s={STILL_S}")
    job = Job(tmp_path, tiny_model, settings).start()
    try:
        job.wait_for("step 2", lambda: done(job) >= 2, pause_s=0.02)
        processes = Processes.of(job)
        pid = pid_of(job, fault.victim, processes)
        os.kill(processes.rank, signal.SIGKILL)
        job.wait_for("its recovery", lambda: "restart 1 of at most " in job.text(), pause_s=0.005)
        assert_ends(job, pid, fault, f"in a recovery, {layout}")
    finally:
        job.kill()
    lab.run(job)
    assert_whole(job, layout, straight)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("layout", ["one", "tp2", "ahead"])
def test_an_engine_is_lost_while_ranks_start_again(
    layout: str, number: signal.Signals, straight: Callable[[str], Job], tmp_path: Path, tiny_model: Path
) -> None:
    """Both are replaced."""
    job = Job(tmp_path, tiny_model, (*EVERYTHING, *LAYOUTS[layout], f"cluster.stall_timeout_s={STILL_S}")).start()
    try:
        job.wait_for("step 2", lambda: done(job) >= 2, pause_s=0.02)
        processes = Processes.of(job)
        os.kill(processes.rank, signal.SIGKILL)
        job.wait_for("its recovery", lambda: "restart 1 of at most " in job.text(), pause_s=0.005)
        os.kill(processes.core, number)
        assert job.finish() == 0 and job.gone(), job.text()[-3000:]
    finally:
        job.kill()
    assert_same(job, straight(layout), "model", "critic")


@pytest.mark.long
def test_a_stopped_helper_of_an_engine_costs_the_engine_alone(tmp_path: Path, tiny_model: Path) -> None:
    """Whatever an engine has started is a part of it, though it may answer without that."""
    job = Job(tmp_path, tiny_model, (*EVERYTHING, SLOW, "rollout.tp=2", f"cluster.stall_timeout_s={STILL_S}")).start()
    try:
        job.wait_for("step 2", lambda: done(job) >= 2, pause_s=0.02)
        processes = Processes.of(job)
        below = {one.pid for one in psutil.Process(processes.actor).children(recursive=True)} - {processes.core}
        helpers = [pid for pid in below if "resource_tracker" in title(pid)]
        assert helpers, [title(pid) for pid in below]
        os.kill(helpers[0], signal.SIGSTOP)
        job.wait_for("its recovery", lambda: "resumed after step " in job.text(), pause_s=0.02)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish(LIMIT_S) == 143 and job.gone(), job.text()[-3000:]
    finally:
        job.kill()
    assert re.findall(r"resumed after step \d+: (.*) replaced", job.text()) == ["engine"], job.text()[-3000:]


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
def test_a_process_that_dies_while_two_ranks_send_is_replaced(
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
