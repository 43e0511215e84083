"""Runs as Slurm jobs on two nodes: however they are interrupted, they end with the weights of a run that nothing happens to.

    .venv/bin/python -m pytest tests/e2e/test_slurm_jobs.py --long

None is part of the suite's own time: tests/slurm/test_script.py has the scripts, signals and requeues without a training run.
"""

import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.comparing import assert_same
from tests.e2e.job import Job, assert_same_first_step
from tests.e2e.lab import Lab
from tests.slurm.cluster import Cluster

STEPS = 8
# A process for each of the four CPUs of two nodes: ranks on both, the engine on the second.
OVERRIDES = (f"train.steps={STEPS}", "layout.ranks=3", "sync.transport=gloo", "train.eval_at_start=false", "rollout.max_response_tokens=24")
SLOW = "reward.source.path=tests.slurm.slow:share_of_letters"  # a step lasts some seconds
QUICK = "cluster.stall_timeout_s=3"
PATIENT = "cluster.stall_timeout_s=3600"  # where a rank is held
ASK_S = 1.0  # between two questions to Slurm
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
SIGUSR1, SIGTERM = KINDS = ("SIGUSR1", "SIGTERM")  # of clusters


class Submitted:
    """A run that is a Slurm job."""

    def __init__(self, slurm: Cluster, job: Job, *options: object) -> None:
        self.slurm, self.job = slurm, job
        said = slurm.megarl("slurm", job.write(), *job.overrides, "cluster.interface=eth0", *options, "--nodes", 2)
        assert said.returncode == 0, said.stdout + said.stderr
        self.number = re.findall(r"submitted job (\d+)", said.stdout)[0]
        self.logs = job.runs / "job" / "slurm"

    @property
    def state(self) -> str:
        return self.slurm.job(self.number, "JobState")

    @property
    def restarts(self) -> int:
        return int(self.slurm.job(self.number, "Restarts"))

    def limit(self, minutes: int) -> None:
        """Sets the time limit of the job's start that runs now."""
        self.slurm.say("scontrol", "update", f"JobId={self.number}", f"TimeLimit={minutes}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """The step that is under way lasts as long as this: a rank on a further node is stopped."""
        rank = next(pid for pid, words in self.slurm.processes(self.further()).items() if words.startswith("ray::ModelWorker"))
        os.kill(rank, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(rank, signal.SIGCONT)

    def further(self) -> str:
        """A node with ranks that is not the head."""
        ranks = {node: "ray::ModelWorker" in " ".join(self.slurm.processes(node).values()) for node in ("n2", "n3")}
        return next(node for node, there in ranks.items() if there)

    def text(self) -> str:
        paths = [self.logs / f"{self.number}.out", *sorted(self.logs.glob(f"{self.number}-*/*.log"))]
        return "\n".join(f"=== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths if path.exists())

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        asked = 0.0

        def come_or_over() -> bool:
            nonlocal asked
            if condition():
                return True
            if time.monotonic() - asked > ASK_S:
                assert self.state not in OVER or condition(), f"{self.state} before {what}\n{self.text()}"
                asked = time.monotonic()
            return False

        try:
            self.slurm.wait_for(what, come_or_over)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def wait_for_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: len(self.job.steps()) >= step)

    def wait_for_restart(self, restarts: int) -> None:
        self.wait_for(f"restart {restarts}", lambda: (self.logs / f"{self.number}-{restarts}").exists())

    def finish(self, state: str = "COMPLETED") -> None:
        self.slurm.wait_for("end", lambda: self.state in OVER, ASK_S)
        assert self.state == state, self.text()
        self.slurm.wait_until_clean()


@pytest.fixture(scope="module")
def straight(lab: Lab, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    """The run that nothing happens to, on this machine alone."""
    return lab.run(Job(tmp_path_factory.mktemp("straight"), tiny_model, OVERRIDES))


@pytest.fixture
def kind(request: pytest.FixtureRequest, slurm: Cluster) -> Iterator[str]:
    """How the cluster warns a job that it preempts: by its own signal, or by SIGTERM to every process of its steps."""
    with slurm.preempting(request.param):
        yield request.param


@pytest.mark.long
def test_a_run_warned_twice_is_requeued_once(slurm: Cluster, straight: Job, tmp_path: Path, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model, (*OVERRIDES, PATIENT))
    first = Submitted(slurm, job)
    first.wait_for_step(2)
    with first.held():
        done, head = len(job.steps()), first.logs / f"{first.number}-0" / "head.json"
        told = json.loads(head.read_text())
        token, port = told["token"], int(told["address"].partition(":")[2])
        assert 10_000 <= port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert stat.S_IMODE(head.stat().st_mode) == 0o600 and len(token) >= 32
        assert any(words.startswith("ray::ModelWorker") for words in slurm.processes("n1").values()), "ranks on both"
        for _ in range(2):
            slurm.say("scancel", "--signal=USR1", "--batch", first.number)
        first.wait_for("the warning", (head.parent / "stop").exists)
    first.wait_for_restart(1)
    [saved] = map(int, re.findall(r"stopped by SIGUSR1: saved at step (\d+);", first.text()))
    assert done <= saved < STEPS and not head.exists()
    first.finish()
    assert first.restarts == 1
    assert_same(job, straight, "model")
    status = slurm.megarl("slurm", "status", job.runs / "job").stdout
    assert re.search(rf"step: {STEPS} of {STEPS}, finished, reward .*tokens/s", status), status
    assert all(said in status for said in ("restarts: 1", "last checkpoint: ", f"job {first.number}: completed")), status
    logs = {path.name for path in (job.runs / "job" / "logs").iterdir()}  # of both nodes
    assert {"engine-0.log", "rank-0.log", "rank-1.log", "rank-2.log"} <= logs, logs
    assert not any(token.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def named(part: object) -> str:
    """A parameter's part of a test's name."""
    return part if isinstance(part, str) else getattr(part, "__name__", "")


def cancel(submitted: Submitted) -> None:
    submitted.slurm.say("scancel", submitted.number)


def kill_driver(submitted: Submitted) -> None:
    """Nobody knows why: as where memory runs out, the next start could end in the same way."""
    [driver] = [pid for pid, words in submitted.slurm.processes("n1").items() if " -m megarl.cli train " in words]
    os.kill(driver, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize(("interrupt", "state", "status"), [(cancel, "CANCELLED", 143), (kill_driver, "FAILED", 137)], ids=named)
def test_a_run_ends_cleanly_and_resumes_when_submitted_again_after_a_fault(
    interrupt: Callable[[Submitted], None],
    state: str,
    status: int,
    kind: str,
    slurm: Cluster,
    straight: Job,
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    job = Job(tmp_path, tiny_model, (*OVERRIDES, SLOW, "save.every=2"))
    first = Submitted(slurm, job)
    first.wait_for_step(3)
    interrupt(first)
    first.finish(state)
    assert first.restarts == 0 and f"the driver has ended with status {status}" in first.text()
    Submitted(slurm, job).finish()
    assert_same(job, straight, "model")


def requeue(submitted: Submitted) -> None:
    submitted.slurm.say("scontrol", "requeue", submitted.number)


def preempt(submitted: Submitted) -> None:
    submitted.slurm.say("sbatch", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


def cut_off(submitted: Submitted) -> None:
    """A node with ranks, and not the head, is there, and reaches nobody."""
    submitted.slurm.cut_off(submitted.further())


def cut_off_head(submitted: Submitted) -> None:
    """So is the node of the driver."""
    submitted.slurm.cut_off("n1")


def die(submitted: Submitted) -> None:
    """All that the run has on such a node is killed; Slurm's own lives on."""
    run = {pid: words for pid, words in submitted.slurm.processes(submitted.further()).items() if "slurmstepd" not in words}
    for pid in run:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def signal_ray(name: str, number: signal.Signals) -> Callable[[Submitted], None]:
    """One of Ray's own processes on the driver's node, after which Ray may end the driver without a word."""

    def interrupt(submitted: Submitted) -> None:
        pid = next(pid for pid, words in submitted.slurm.processes("n1").items() if Path(words.partition(" ")[0]).name == name)
        os.kill(pid, number)

    interrupt.__name__ = f"{number.name} to {name}"
    return interrupt


def run_out_of_time(submitted: Submitted) -> None:
    """The time limit is one to two minutes from now; Slurm warns 110 s before it."""
    hours, minutes, _ = map(int, submitted.slurm.job(submitted.number, "RunTime").split(":"))
    with submitted.held():  # else the run could be over by then
        submitted.limit(60 * hours + minutes + 2)
        submitted.wait_for("the warning", (submitted.logs / f"{submitted.number}-0" / "stop").exists)


@pytest.mark.long
@pytest.mark.parametrize(
    ("interrupt", "options", "kind"),
    [
        (requeue, (), SIGUSR1),
        *((preempt, (), kind) for kind in KINDS),
        (cut_off, (), SIGUSR1),
        *((cut_off_head, (), kind) for kind in KINDS),
        *((run_out_of_time, (PATIENT, "--time", 60, "--grace", 110), kind) for kind in KINDS),
        *(
            (signal_ray(name, number), (QUICK,), SIGUSR1)
            for name in ("gcs_server", "raylet")
            for number in (signal.SIGKILL, signal.SIGSTOP)
        ),
        (signal_ray("raylet", signal.SIGKILL), (QUICK,), SIGTERM),
    ],
    indirect=["kind"],
    ids=named,
)
def test_a_run_resumes_after_a_fault(
    interrupt: Callable[[Submitted], None],
    options: tuple[str, ...],
    kind: str,
    slurm: Cluster,
    straight: Job,
    tmp_path: Path,
    tiny_model: Path,
) -> None:
    job = Job(tmp_path, tiny_model, (*OVERRIDES, SLOW, "save.every=2"))
    submitted = Submitted(slurm, job, *options)
    submitted.wait_for_step(3)
    begun = time.monotonic()
    with slurm.healed():
        interrupt(submitted)
        submitted.wait_for_restart(1)
        print(f"{interrupt.__name__}, {kind}: again after {time.monotonic() - begun:.1f} s")
        submitted.limit(60)
        slurm.wait_for("end", lambda: submitted.state in OVER, ASK_S)
    submitted.finish()
    assert_same(job, straight, "model")
    if interrupt is preempt:
        assert re.search(rf"stopped by {kind}: saved at step \d+;", submitted.text()), submitted.text()
        assert "saved on Slurm's request: queued again" in submitted.text()
    if interrupt is cut_off:
        [lost] = re.findall(r"(n\d): died: queued again", submitted.text())
        before, after = re.findall(r"2 nodes \((n\d n\d)\)", submitted.text())
        assert lost in before and lost not in after


@pytest.mark.long
@pytest.mark.parametrize("lose", [cut_off, die])
def test_a_lost_node_is_replaced_by_the_spare_one(
    lose: Callable[[Submitted], None], slurm: Cluster, straight: Job, tmp_path: Path, tiny_model: Path
) -> None:
    job = Job(tmp_path, tiny_model, (*OVERRIDES, SLOW, "save.every=2"))
    slurm.wait_until_idle()  # else the job would not wait for the spare one
    submitted = Submitted(slurm, job, "--spare", 1)
    submitted.wait_for_step(3)
    with slurm.healed():
        lose(submitted)
        slurm.wait_for("end", lambda: submitted.state in OVER, ASK_S)
    if lose is die:  # and what removes the session's directory: no process is left, and the next start there sweeps the directory
        slurm.wait_for("end of all processes", lambda: not any(slurm.processes(f"n{n}") for n in (1, 2, 3)), limit_s=60)
        said = slurm.run(
            "srun", "--quiet", "-N3", "--ntasks-per-node=1", sys.executable, "-c", "from megarl.host.scratch import sweep; sweep()"
        ).stderr
        assert re.fullmatch(r"megarl: cleaned up after a killed run: removed /tmp/megarl-\w+, ended 0 processes\n", said), said
    submitted.finish()
    [restart] = json.loads((job.runs / "job" / "summary.json").read_text())["restarts"]
    print(f"{lose.__name__}: {restart}")
    assert restart["kind"] == "node" and restart["lost_steps"] <= 2 and submitted.restarts == 0
    assert_same(job, straight, "model")


@pytest.mark.long
@pytest.mark.parametrize("for_good", [False, True])
def test_a_killed_slurmd_costs_a_run_nothing(for_good: bool, slurm: Cluster, straight: Job, tmp_path: Path, tiny_model: Path) -> None:
    """Whether it is there again at once, or Slurm gives its node up: the processes of the run live on."""
    job = Job(tmp_path, tiny_model, (*OVERRIDES, SLOW, "save.every=2"))
    slurm.wait_until_idle()
    submitted = Submitted(slurm, job)
    submitted.wait_for_step(2)
    node = submitted.further()
    with slurm.healed():
        slurm.kill_slurmd(node, for_good=for_good)
        if for_good:
            with submitted.held():
                submitted.wait_for("a node down", lambda: "down" in slurm.say("sinfo", "-h", "-n", node, "-o", "%t"))
        slurm.wait_for("end", lambda: submitted.state in OVER, ASK_S)
    submitted.finish()
    assert json.loads((job.runs / "job" / "summary.json").read_text())["restarts"] == [] and submitted.restarts == 0
    assert_same(job, straight, "model")


@pytest.mark.long
def test_an_engine_spans_two_nodes(slurm: Cluster, lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """Three members, of which no node's two CPUs hold all, and a rank: the run is that of a single engine on one machine."""
    settings = ("train.steps=3", "sync.transport=gloo", "train.eval_at_start=false")
    alone = lab.run(Job(tmp_path / "alone", tiny_model, settings))
    job = Job(tmp_path / "spread", tiny_model, (*settings, "rollout.dp=3", "rollout.expert_parallel=true", SLOW))
    slurm.wait_until_idle()
    submitted = Submitted(slurm, job)
    submitted.wait_for_step(1)
    there = [" ".join(slurm.processes(node).values()) for node in ("n1", "n2", "n3")]
    assert sum("ray::EngineMember" in titles or "ray::RolloutWorker" in titles for titles in there) == 2, there
    submitted.finish()
    assert_same_first_step(job, alone)
    assert all(step["training/rollout_probs_diff_mean"] < 1e-5 for step in job.steps())
