"""The job script on a real Slurm: what it takes for an end, and what it queues again. In the driver's place stands a script of the test."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.slurm.job import Job
from megarl.slurm.script import NODE_SCRIPTS, render, templates
from tests.e2e.job import RL
from tests.slurm.cluster import Cluster
from tests.slurm.virtual import MANY
from tests.unit.slurm.test_submission import JOB

# Called as the driver's python is: its last argument is cluster.allocation=LOGS/JOB-RESTART.
HERE = "allocation=${!#}; allocation=${allocation#*=}; restart=${allocation##*-}; here=$SLURMD_NODENAME"
# Begins what stands in the place of the other nodes, too.
OTHER = "((restart)) && exit 0; if [[ ${!#} != *=* ]]; then until [[ -e $allocation/head.json ]]; do sleep .1; done;"
DRIVERS = {
    "spare": "exit 0",  # the first, while all nodes are free
    "refused": "exit 2",
    "failed": "exit 1",
    "saved": "exit 138",
    "evaluated": "exit 138",
    "lost": '((restart)) && exit 0; echo "$here died" >$allocation/lost; echo died >$allocation/bad-$here; exit 1',
    # The other node's part ends while the session is open, as where srun has given it up; and as it should, before the driver does.
    "stepless": f"{OTHER} exit 1; fi; touch $allocation/head.json; sleep 3; "
    'for n in 1 2 3; do echo died >$allocation/bad-n$n; done; echo "all died" >$allocation/lost; exit 1',
    "left": f"{OTHER} echo $here >$allocation/other; while [[ -e $allocation/head.json ]]; do sleep .1; done; exit 0; fi; "
    "touch $allocation/head.json; sleep 2; rm $allocation/head.json; sleep 4; other=$(<$allocation/other); "
    'echo died >$allocation/bad-$other; echo "$other died" >$allocation/lost; exit 1',
    # Of two other nodes one leaves: the other one's part goes on, for longer than slurm.conf's WaitTime.
    "thinned": f"{OTHER} mkdir $allocation/gone && exit 1; while [[ -e $allocation/head.json ]]; do sleep .1; done; "
    "touch $allocation/stayed; exit 0; fi; touch $allocation/head.json; sleep 6; rm $allocation/head.json; sleep 2; rm $allocation/stayed",
    "warned": "until [[ -e $allocation/stop ]]; do sleep .1; done; ((restart)) && exit 0; exit 138",
    "chained": "[[ -e $allocation/../once ]] && exit 0; touch $allocation/../once; exit 138",
}
# Of a session that ends for all nodes but the first, which does not answer any more.
HEADLESS = "touch $allocation/on-$here; [[ ${!#} == *=* ]] && sleep infinity; until [[ -e $allocation/over ]]; do sleep .1; done; exit 1"
OPTIONS = {
    "spare": {"spare": 2},
    "stepless": {"nodes": 2},
    "lost": {"exclude": "n3"},
    "left": {"nodes": 2},
    "thinned": {"nodes": 3},
    "saved": {"max_restarts": 2},
    "evaluated": {"verb": "eval"},
    "chained": {"chain": 3},
}
SUBMIT = """
    import sys
    from dataclasses import replace
    from pathlib import Path
    from megarl.config import TrainConfig, load
    from megarl.slurm.checks import check_partition, partition_of
    from megarl.slurm.submit import submit
    from tests.slurm.test_script import DRIVERS, OPTIONS, script_job

    job = script_job(Path("/"), "n")
    print(partition_of(job))
    for wrong in (replace(job, partition="nowhere"), replace(job, gpus_per_node=9)):
        try:
            check_partition(wrong, partition_of(wrong))
        except ValueError as error:
            print(error)
    for name in DRIVERS:
        config = load(Path(sys.argv[1]), [f"name={name}"], TrainConfig)
        print(name, *submit(replace(script_job(config.directory, str(Path(sys.argv[2], name))), **OPTIONS.get(name, {})), config))
"""


def script_job(directory: Path, python: str) -> Job:
    return replace(JOB, name=directory.name or "root", directory=directory, here=Path("/"), nodes=1, gpus_per_node=8, python=python)


def test_the_script_queues_again_what_was_saved_or_lost_a_node_and_nothing_else(slurm: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    for name, body in DRIVERS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{HERE}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    submitting = (sys.executable, "-c", textwrap.dedent(SUBMIT), tmp_path / "job.yaml", tmp_path)
    partition, nowhere, nine, *lines = slurm.say(*submitting).splitlines()
    assert partition == "Partition(name='main', nodes=3, sizes=((2, 8), (2, 8), (2, 8)))"
    assert nowhere == "slurm: --partition nowhere: this cluster has main, high, many"
    assert nine == "slurm: --gpus-per-node 9: a node of partition main has 8"
    jobs = {line.split()[0]: line.split()[1:] for line in lines}

    def text(name: str) -> str:
        return "".join(path.read_text() for path in sorted((tmp_path / "runs" / name / "slurm").glob("*.out")))

    def field(name: str, field: str) -> list[str]:
        return [slurm.job(number, field) for number in jobs[name]]

    [warned] = jobs["warned"]
    for restart in (0, 1):
        slurm.wait_for(f"start {restart}", (tmp_path / f"runs/warned/slurm/{warned}-{restart}/nodes.json").exists)
        slurm.say("scancel", "--signal=USR1", "--batch", warned)
        for _ in range(2 * (not restart)):  # the second start ends at once, and Slurm's own step aborts where a signal comes meanwhile
            slurm.run("scancel", "--signal=USR1", "--batch", warned)
    running = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING")
    slurm.wait_for("end", lambda: not any(state in running for name in jobs for state in field(name, "JobState")), limit_s=200)
    ends = {name: list(zip(field(name, "JobState"), field(name, "ExitCode"), field(name, "Restarts"), strict=True)) for name in jobs}
    assert ends == {
        "spare": [("COMPLETED", "0:0", "0")],
        "refused": [("FAILED", "2:0", "0")],
        "failed": [("FAILED", "1:0", "0")],
        "saved": [("FAILED", "138:0", "2")],
        "evaluated": [("FAILED", "138:0", "0")],
        "lost": [("COMPLETED", "0:0", "1")],
        "stepless": [("COMPLETED", "0:0", "1")],
        "left": [("COMPLETED", "0:0", "1")],
        "thinned": [("COMPLETED", "0:0", "0")],
        "warned": [("COMPLETED", "0:0", "1")],
        "chained": [("FAILED", "138:0", "0"), ("COMPLETED", "0:0", "0"), ("COMPLETED", "0:0", "0")],
    }, "\n".join(map(text, jobs))
    assert "3 nodes (n1 n2 n3)" in text("spare")
    assert "not queued again after 2 restarts (--max-restarts)" in text("saved")
    first, second = re.findall(r"1 nodes \((n\d)\)", text("lost"))
    assert {first, second} == {"n1", "n2"} and slurm.job(jobs["lost"][0], "ExcNodeList") == f"n3,{first}"
    assert slurm.job(jobs["stepless"][0], "ExcNodeList") == "(null)"
    [lost] = re.findall(r": (n\d) died: queued again", text("left"))
    assert slurm.job(jobs["left"][0], "ExcNodeList") == lost, text("left")
    assert "the next job of the chain goes on" in text("chained") and text("chained").count("nothing to do: the run is finished") == 1
    slurm.wait_until_clean()


@pytest.mark.long
def test_a_node_that_is_left_queues_the_job_again_as_long_as_it_may(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(f"#!/usr/bin/env bash\n{HERE}\n{HEADLESS}\n")
    (tmp_path / "python").chmod(0o755)
    job = replace(script_job(tmp_path, str(tmp_path / "python")), nodes=2, spare=1, max_restarts=1)
    for name in NODE_SCRIPTS:
        shutil.copy(templates() / name, tmp_path)
    (tmp_path / "job.sbatch").write_text(render(job, tmp_path))
    (tmp_path / "slurm").mkdir()
    slurm.wait_until_idle()
    number = slurm.say("sbatch", "--parsable", tmp_path / "job.sbatch")

    def lose(restart: int, first: str, *others: str) -> None:
        logs = tmp_path / "slurm" / f"{number}-{restart}"
        slurm.wait_for("all nodes", lambda: all((logs / f"on-{node}").exists() for node in (first, *others)))
        slurm.cut_off(first)
        slurm.say("scontrol", "update", f"NodeName={first}", "State=DOWN", "Reason=test")  # which Slurm says itself after SlurmdTimeout
        (logs / "over").touch()
        told = f"{first}, the first node, is lost: {'cancelled' if restart else 'queued again'}"
        slurm.wait_for(told, lambda: any(told in (logs / f"{node}.log").read_text() for node in others))

    with slurm.healed():
        lose(0, "n1", "n2", "n3")
        lose(1, "n2", "n3")
        slurm.wait_for("end", lambda: slurm.job(number, "JobState") == "CANCELLED")
    assert slurm.job(number, "Restarts") == "1"
    slurm.wait_until_clean()


def test_scripts_for_one_to_64_nodes_are_what_sbatch_accepts(slurm: Cluster, tmp_path: Path) -> None:
    for nodes in (1, 2, 16, MANY, MANY + 1):
        job = replace(script_job(tmp_path, "python"), nodes=nodes, spare=0, partition="many", time="4:00:00", exclude="n1")
        (tmp_path / "job.sbatch").write_text(render(job, tmp_path))
        done = slurm.run("sbatch", "--test-only", tmp_path / "job.sbatch")
        assert (done.returncode == 0) == (nodes <= MANY), done.stderr


def test_what_sbatch_refuses_is_said_in_a_line_and_leaves_nothing(slurm: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    done = slurm.megarl("slurm", tmp_path / "job.yaml", "--nodes", 1, "--sbatch=--licenses=gold")
    assert done.returncode == 2 and re.fullmatch("megarl: error: slurm: sbatch: .*[Ll]icense.*\n", done.stderr), done.stderr
    assert not list((tmp_path / "runs").rglob("submitted*")) and slurm.say("squeue", "--noheader") == ""


def test_a_run_that_is_in_the_queue_is_not_submitted_again(slurm: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    submitting = ("slurm", tmp_path / "job.yaml", "--nodes", 1, "--sbatch=--hold")
    assert slurm.megarl(*submitting, "name=other").returncode == 0, "another run"
    said = slurm.megarl(*submitting)
    [number] = re.findall(r"submitted job (\d+)", said.stdout)
    run = tmp_path / "runs" / "job"
    assert f"job {number}: pending" in slurm.megarl("slurm", "status", run).stdout
    again = slurm.megarl(*submitting)
    assert (again.returncode, again.stderr) == (2, f"megarl: error: slurm: job {number} of {run} is pending (scancel {number} ends it)\n")
    slurm.say("scancel", "--me")
    assert f"job {number}: cancelled" in slurm.megarl("slurm", "status", run).stdout
    assert slurm.megarl(*submitting).returncode == 0
    slurm.say("scancel", "--me")
