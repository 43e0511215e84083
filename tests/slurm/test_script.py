"""The job script on a real Slurm: what it takes for an end, and what it queues again. In the driver's place stands a script of the test."""

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.slurm.job import Job
from megarl.slurm.script import NODE_SCRIPTS, render, templates
from tests.e2e.job import RL
from tests.rows import rows
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
    "unstarted": "exit 2",
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
# Jobs that are preempted, or asked to end: the driver saves where Slurm warns it in either way, and goes once it has begun to end the job.
WARNED = (
    "((restart)) && exit 0; trap 'touch $allocation/saved; exit 143' TERM; until [[ -e $allocation/stop ]]; do sleep .1; done; exit 138"
)
ASKED = {
    "preempted": WARNED,
    "preempted-eval": WARNED,
    "preempted-chain": "[[ -e $allocation/../once ]] && exit 0; touch $allocation/../once; " + WARNED,
    "signalled": WARNED,
    "cancelled": "trap '' TERM; until [[ -e $allocation/over ]]; do sleep .1; done; touch $allocation/left; exit 143",
}
SHOW = dict.fromkeys(("shown", "shown-alone"), "env >$allocation/env; exit 0")
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
    "preempted-eval": {"verb": "eval"},
    "preempted-chain": {"chain": 2},
    "shown-alone": {"sbatch": ["--export=NONE"]},  # the user's own wish
    "unstarted": {"container": "docker://image"},  # there is no pyxis, so srun ends by itself
}
SUBMIT = """
    import sys
    from dataclasses import replace
    from pathlib import Path
    from megarl.config import TrainConfig, load
    from megarl.slurm.partition import check_limits, check_partition, partition_of
    from megarl.slurm.submit import submit
    from tests.slurm.test_script import OPTIONS, script_job

    job = script_job(Path("/"), "n")
    print(partition_of(job))
    wrong = [{"partition": "nowhere"}, {"gpus_per_node": 9}, {"partition": "short", "nodes": 3}, {"partition": "short"}]
    wrong += [{"partition": "short", "time": "1:00:00"}, {"partition": "shut"}, {"partition": "paid", "account": "dev"}]
    wrong += [{"partition": "paid", "qos": "low"}]
    for one in wrong:
        try:
            asked = replace(job, **one)
            check_partition(asked, partition_of(asked))
            check_limits(asked, partition_of(asked))
        except ValueError as error:
            print(error)
    for name in sys.argv[3:]:
        config = load(Path(sys.argv[1]), [f"name={name}"], TrainConfig)
        print(name, *submit(replace(script_job(config.directory, str(Path(sys.argv[2], name))), **OPTIONS.get(name, {})), config))
"""


def script_job(directory: Path, python: str) -> Job:
    return replace(JOB, name=directory.name or "root", directory=directory, here=Path("/"), nodes=1, gpus_per_node=8, python=python)


def submitted(
    slurm: Cluster, directory: Path, model: Path, drivers: Mapping[str, str], *inside: str, env: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, list[str]]]:
    """Submit a job, or a chain, for each of the drivers. Returns what the checks of partitions say, and the jobs of each driver."""
    (directory / "job.yaml").write_text(RL.format(runs=directory / "runs", model=model))
    for name, body in drivers.items():
        (directory / name).write_text(f"#!/usr/bin/env bash\n{HERE}\n{body}\n")
        (directory / name).chmod(0o755)
    done = slurm.run(*inside, sys.executable, "-c", textwrap.dedent(SUBMIT), directory / "job.yaml", directory, *drivers, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    numbers = [line.split() for line in lines[-len(drivers) :]]
    return lines[: -len(drivers)], {name: jobs for name, *jobs in numbers}


def ends(slurm: Cluster, jobs: Mapping[str, list[str]]) -> dict[str, list[tuple[str, str, str]]]:
    """Wait for the end of all jobs, and return the state, the status and the restarts of each."""
    running = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED")

    def fields(name: str) -> list[tuple[str, str, str]]:
        return [(slurm.job(job, "JobState"), slurm.job(job, "ExitCode"), slurm.job(job, "Restarts")) for job in jobs[name]]

    slurm.wait_for("end", lambda: not any(state in running for name in jobs for state, *_ in fields(name)), limit_s=200)
    return {name: fields(name) for name in jobs}


def output(directory: Path, name: str) -> str:
    """What the script has printed in all jobs of a driver."""
    return "".join(path.read_text() for path in sorted((directory / "runs" / name / "slurm").glob("*.out")))


@pytest.mark.parametrize("by", rows(["SIGUSR1", "SIGTERM"], ["SIGTERM"]))
def test_a_preempted_run_is_saved_and_queued_again_on_both_kinds_of_cluster(
    by: str, slurm: Cluster, tmp_path: Path, tiny_model: Path
) -> None:
    slurm.wait_until_idle()
    with slurm.preempting(by):
        preempted = {name: body for name, body in ASKED.items() if name.startswith("preempted")}
        _, jobs = submitted(slurm, tmp_path, tiny_model, preempted)
        for name in preempted:
            slurm.wait_for(f"the driver of {name}", (tmp_path / "runs" / name / "slurm" / f"{jobs[name][0]}-0" / "started").exists)
        slurm.say("sbatch", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true")
        status = "138:0" if by == "SIGUSR1" else "143:0"
        assert ends(slurm, jobs) == {
            "preempted": [("COMPLETED", "0:0", "1")],
            "preempted-eval": [("FAILED", status, "0")],
            "preempted-chain": [("FAILED", status, "0"), ("COMPLETED", "0:0", "0")],
        }, "\n".join(output(tmp_path, name) for name in preempted)
    assert "saved on Slurm's request: queued again" in output(tmp_path, "preempted")
    for name, [first, *_] in jobs.items():
        assert (tmp_path / f"runs/{name}/slurm/{first}-0/saved").exists() == (by == "SIGTERM")
    slurm.wait_until_clean()


def test_jobs_ended_by_the_user_are_not_requeued(slurm: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    """Neither a cancelled job, which leaves at once, nor one whose steps somebody ends by SIGTERM, as Slurm does in a preemption."""
    _, jobs = submitted(slurm, tmp_path, tiny_model, {name: ASKED[name] for name in ("signalled", "cancelled")})
    for name in jobs:
        slurm.wait_for(f"the driver of {name}", (tmp_path / "runs" / name / "slurm" / f"{jobs[name][0]}-0" / "started").exists)
    slurm.say("scancel", "--signal=TERM", *jobs["signalled"])
    slurm.say("scancel", *jobs["cancelled"])
    slurm.wait_for("the cancelled driver's end", (tmp_path / f"runs/cancelled/slurm/{jobs['cancelled'][0]}-0/left").exists, limit_s=20)
    ended = ends(slurm, jobs)
    assert ended["signalled"] == [("FAILED", "143:0", "0")], output(tmp_path, "signalled")
    assert [(state, restarts) for state, _, restarts in ended["cancelled"]] == [("CANCELLED", "0")]
    slurm.wait_until_clean()


# What a shell, a site's profile or the surrounding job may have set, and what of it must not reach a step.
SHELL = {"SBATCH_EXPORT": "NONE", "SBATCH_TIMELIMIT": "7", "SBATCH_PARTITION": "many", "SRUN_EXPORT_ENV": "NONE", "SLURM_TIMELIMIT": "1"}
FOREIGN = ("SBATCH_", "SRUN_EXPORT_ENV", "SLURM_TIMELIMIT", "SLURM_MEM_PER_CPU", "SLURM_EXPORT_ENV", "SLURM_CPUS_PER_TASK")


@pytest.mark.parametrize("inside", [(), ("salloc", "--quiet", "--nodes=1", "--time=1", "--mem-per-cpu=10", "--cpus-per-task=1")])
def test_the_submitting_shell_does_not_change_the_job(inside: tuple[str, ...], slurm: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    slurm.wait_until_idle()
    _, jobs = submitted(slurm, tmp_path, tiny_model, SHOW, *inside, env=SHELL)
    assert ends(slurm, jobs) == dict.fromkeys(SHOW, [("COMPLETED", "0:0", "0")]), "\n".join(output(tmp_path, name) for name in SHOW)
    for name, [number] in jobs.items():
        assert slurm.job(number, "Partition") == "main" and slurm.job(number, "TimeLimit") in ("UNLIMITED", "365-00:00:00")
        variables = (tmp_path / f"runs/{name}/slurm/{number}-0/env").read_text().splitlines()
        assert any(line.startswith("PATH=") for line in variables) and "SLURM_CPUS_ON_NODE=2" in variables
        assert not [line for line in variables if line.startswith(FOREIGN)], variables


def test_the_script_requeues_only_saved_runs_and_lost_nodes(slurm: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    said, jobs = submitted(slurm, tmp_path, tiny_model, DRIVERS)
    partition, nowhere, nine, three, default, longer, shut, paid, low = said
    assert partition.startswith("Partition(name='main', nodes=3, sizes=((2, 8), (2, 8), (2, 8)), state='UP', default_time=None,")
    assert nowhere == "slurm: --partition nowhere: this cluster has main, high, many, short, shut, paid"
    assert nine == "slurm: --gpus-per-node 9: a node of partition main has 8"
    assert three == "slurm: --nodes 3: partition short gives a job 2 (MaxNodes)"
    assert default.startswith("slurm: no --time: partition short ends a job after 300 s (DefaultTime), of which --grace 600, ")
    assert longer == "slurm: --time 1:00:00 is 3600 s: partition short allows 1800 s (MaxTime)"
    assert shut == "slurm: partition shut is down: it starts no jobs (State)"
    assert paid == "slurm: --account dev: partition paid takes jobs of prod (AllowAccounts)"
    assert low == "slurm: --qos low: partition paid takes jobs of long (AllowQos)"

    def text(name: str) -> str:
        return output(tmp_path, name)

    def field(name: str, field: str) -> list[str]:
        return [slurm.job(number, field) for number in jobs[name]]

    [warned] = jobs["warned"]
    for restart in (0, 1):
        slurm.wait_for(f"start {restart}", (tmp_path / f"runs/warned/slurm/{warned}-{restart}/nodes.json").exists)
        slurm.say("scancel", "--signal=USR1", "--batch", warned)
        for _ in range(2 * (not restart)):  # the second start ends at once, and Slurm's own step aborts where a signal comes meanwhile
            slurm.run("scancel", "--signal=USR1", "--batch", warned)
    assert ends(slurm, jobs) == {
        "spare": [("COMPLETED", "0:0", "0")],
        "refused": [("FAILED", "2:0", "0")],
        "failed": [("FAILED", "1:0", "0")],
        "unstarted": [("FAILED", "1:0", "0")],
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
    assert "the driver could not be started" in text("unstarted") and not list((tmp_path / "runs/unstarted").rglob("ended"))
    assert "not queued again after 2 restarts (--max-restarts)" in text("saved")
    first, second = re.findall(r"1 nodes \((n\d)\)", text("lost"))
    assert {first, second} == {"n1", "n2"} and slurm.job(jobs["lost"][0], "ExcNodeList") == f"n3,{first}"
    assert slurm.job(jobs["stepless"][0], "ExcNodeList") == "(null)"
    [lost] = re.findall(r": (n\d) died: queued again", text("left"))
    assert slurm.job(jobs["left"][0], "ExcNodeList") == lost, text("left")
    assert "the next job of the chain goes on" in text("chained") and text("chained").count("nothing to do: the run is finished") == 1
    slurm.wait_until_clean()


@pytest.mark.long
def test_a_remaining_node_requeues_the_job_while_restarts_remain(slurm: Cluster, tmp_path: Path) -> None:
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


def test_a_refusal_of_sbatch_is_one_line_and_leaves_nothing(slurm: Cluster, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    done = slurm.megarl("slurm", tmp_path / "job.yaml", "--nodes", 1, "--sbatch=--licenses=gold")
    assert done.returncode == 2 and re.fullmatch("megarl: error: slurm: sbatch: .*[Ll]icense.*\n", done.stderr), done.stderr
    assert not list((tmp_path / "runs").rglob("submitted*")) and slurm.say("squeue", "--noheader") == ""


@pytest.mark.long
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
