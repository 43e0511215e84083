"""A run whose engine has several members: data-parallel ranks, each in processes of its own."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.job import Job, assert_same_first_step
from tests.rows import rows

MEMBERS = ("rollout.dp=2", "rollout.expert_parallel=true", "sync.transport=gloo")


@pytest.mark.long
def test_an_engine_with_two_members_gives_the_run_of_one(tmp_path: Path, one_rank: Job, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model, (*MEMBERS, "train.steps=2")).run()
    assert_same_first_step(job, one_rank)
    assert all(step["training/rollout_probs_diff_mean"] < 1e-5 for step in job.steps())
    assert {"engine-0.log", "engine-0-member-1.log"} <= {path.name for path in (job.runs / "job" / "logs").iterdir()}
    assert job.gone()


def victims(job: Job) -> dict[str, int]:
    """The process of the second member, its core, and the coordinator, which the engine starts before its own core."""
    [raylet] = [process for process in map(psutil.Process, job.pids()) if process.name() == "raylet"]
    actors = {process.cmdline()[0].partition(".")[0]: process for process in raylet.children()}  # an engine's own bear its actor's title
    member, engine = actors["ray::EngineMember"], actors["ray::RolloutWorker"]
    first = {actor: min(child.pid for child in actor.children()) for actor in (member, engine)}
    return {"member": member.pid, "core": first[member], "coordinator": first[engine]}


LOST = [("member", signal.SIGKILL), ("core", signal.SIGKILL), ("coordinator", signal.SIGKILL), ("core", signal.SIGSTOP)]


@pytest.mark.parametrize(("victim", "number"), rows(LOST, []))
def test_an_engine_that_loses_a_process_is_replaced_and_the_run_goes_on(
    victim: str, number: signal.Signals, tmp_path: Path, tiny_model: Path
) -> None:
    settings = ("train.steps=8", "rollout.max_response_tokens=64", "train.eval_every=0", "cluster.stall_timeout_s=6")
    job = Job(tmp_path, tiny_model, (*MEMBERS, *settings)).start()
    try:
        job.wait_for("step 2", lambda: len(job.steps()) >= 2, pause_s=0.02)
        os.kill(victims(job)[victim], number)
        assert job.finish() == 0 and job.gone(), job.text()[-3000:]
    finally:
        job.kill()
    assert len(job.steps()) == 8
    [restart] = [line for line in job.text().splitlines() if "restart 1 of at most" in line]
    said = {"member": "engine 0: its member 1 has ended (", "core": "engine 0: its member 1 has ended (pid ", "coordinator": "engine 0: "}
    assert ("engine 0: ray::EngineMember" if number == signal.SIGSTOP else said[victim]) in restart, restart
    assert "restart 2 of" not in job.text()
