"""What `megarl slurm` writes, and what it refuses, without a Slurm: the scripts are Bash without a fault, and bad input gets one line."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megarl.config import TrainConfig, TrainingSettings, load
from megarl.errors import ConfigError
from megarl.imports import find
from megarl.slurm.checks import check_python
from megarl.slurm.job import Job
from megarl.slurm.main import main
from megarl.slurm.options import options
from megarl.slurm.partition import Partition, check_limits, check_partition, partition_of
from megarl.slurm.script import NODE_SCRIPTS, TEMPLATE, render, templates
from megarl.slurm.submit import submit
from megarl.verbs import VERBS
from tests.e2e.job import RL

JOB = Job(
    name="a-run",
    directory=Path("/shared/runs/a run"),
    here=Path("/home/me"),
    reads=(Path("/shared/runs"), Path("/models/m")),
    verb="train",
    nodes=4,
    gpus_per_node=8,
    counts_gpus=True,
    spare=0,
    partition=None,
    account=None,
    qos=None,
    time=None,
    grace=600,
    exclude=None,
    max_restarts=20,
    chain=1,
    sbatch=[],
    container=None,
    runtime="pyxis",
    mount=[],
    python="/env/bin/python",
)
SCRIPTS = JOB.directory / "slurm" / "submitted-1"
JOBS = {
    "bare": JOB,
    "all": replace(JOB, spare=2, partition="p", account="a", qos="q", time="4:00:00", exclude="n[1-3]", sbatch=["--reservation=r"]),
    "chain": replace(JOB, chain=3, nodes=1),
    "pyxis": replace(JOB, container="/images/it's.sqsh", mount=["/data", "/a:/b"]),
    "apptainer": replace(JOB, container="/images/m.sif", runtime="apptainer"),
}


def shown(script: str, *names: str) -> list[list[str]]:
    """What Bash takes the settings of a script for."""
    [block] = re.findall(r"^set -uo pipefail$(.*?)^restart=", script, re.MULTILINE | re.DOTALL)
    lines = [block, *(f'printf "%s\\n" "${{{name}[@]}}" .' for name in names)]
    said = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout.splitlines()
    found: list[list[str]] = [[]]
    for line in said:
        found[-1].append(line) if line != "." else found.append([])
    return found[:-1]


@pytest.mark.parametrize("name", JOBS)
def test_scripts_are_valid_bash_with_the_requested_options(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    script = render(job, SCRIPTS)
    (tmp_path / TEMPLATE).write_text(script)
    scripts = [tmp_path / TEMPLATE, *(templates() / node for node in (TEMPLATE, *NODE_SCRIPTS))]
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    assert all(subprocess.run(["bash", "-n", script]).returncode == 0 for script in scripts)
    options = {word for line in script.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line.removeprefix("#SBATCH "))}
    assert {
        "--signal=B:USR1@600",
        "--no-kill",
        "--open-mode=append",
        "--exclusive",
        "--propagate=NONE",
        f"--gpus-per-node={job.gpus_per_node}",
    } <= options
    assert "--job-name=a-run" in options
    assert f"--output={job.directory}/slurm/%j.out" in options
    assert ("--requeue" in options) == (job.chain == 1) != ({"--no-requeue", "--dependency=singleton"} <= options)
    if name == "all":
        assert {
            "--nodes=4-6",
            "--partition=p",
            "--account=a",
            "--qos=q",
            "--time=4:00:00",
            "--exclude=n[1-3]",
            "--reservation=r",
        } <= options
    folder, needed, step, inside = shown(script, "scripts", "needed", "step_options", "inside")
    assert folder == [str(SCRIPTS)] and needed == [str(job.nodes)]
    seen = ["/home/me:/home/me", "/shared/runs:/shared/runs", "/models/m:/models/m"]
    if name == "pyxis":
        assert step[:2] == ["--container-image=/images/it's.sqsh", f"--container-mounts={','.join([*seen, '/data:/data', '/a:/b'])}"]
    elif name == "apptainer":
        assert inside[:3] == ["apptainer", "exec", "--nv"] and inside[-1] == "/images/m.sif" and set(seen) <= set(inside)
    else:
        assert [*step, *inside] == [""] * len([step, inside]) or not [word for word in (*step, *inside) if word]


BAD = {
    "a missing partition is told by the cluster alone": ([], "not compared"),
    "no node": (["--nodes", "0"], "--nodes 0 is not between 1 and"),
    "GPUs for a run without": (["--gpus-per-node", "8"], "--gpus-per-node 8 does not go with cluster.gpus=false"),
    "no GPUs for a run with": (["cluster.gpus=true"], "--gpus-per-node 0 does not go with cluster.gpus=true"),
    "larger nodes than planned": (
        ["cluster.gpus=true", "cluster.gpus_per_node=4", "--gpus-per-node", "8"],
        "--gpus-per-node 8: more than cluster.gpus_per_node=4",
    ),
    "idle GPUs": (["cluster.gpus=true", "--gpus-per-node", "8"], "--nodes 2: of 16 GPUs the run uses 2 (policy 1x1, engines 1x1)"),
    "too few GPUs": (["cluster.gpus=true", "layout.ranks=16", "--gpus-per-node", "8"], "--nodes 2: 17 GPUs are asked for"),
    "a mount of no container": (["--mount", "/tmp"], "--mount /tmp: needs --container"),
    "no time left": (["--time", "10"], "--time 10 is 600 s, of which --grace 600"),
    "no time": (["--time", "soon"], "--time 'soon' is not a time limit"),
    "no option": (["--sbatch=reservation"], "--sbatch 'reservation' is not an sbatch option"),
    "half a quotation": (["--sbatch=--comment='a"], "No closing quotation"),
    "an array": (["--sbatch=--array=1-3"], "'--array=1-3': the tasks of an array would share the run's directory"),
    "an abbreviated array": (["--sbatch=--arr 1-3"], "'--arr=1-3': the tasks of an array"),
    "a short array": (["--sbatch=-a1-3"], "'-a1-3': the tasks of an array"),
    "a name": (["--sbatch=-J other"], "'-Jother': the job is named after the run"),
    "a name behind a flag": (["--sbatch=-HJ other"], "'-Jother': the job is named after the run"),
    "a signal": (["--sbatch=--signal=USR2@60"], "--grace says when Slurm warns"),
    "no requeue": (["--sbatch=--no-requeue"], "--max-restarts or --chain says"),
    "a log": (["--sbatch=-o x.out"], "the job's log is slurm/JOB.out"),
    "a second option in one": (["--sbatch=--hold --output=x.out"], "the job's log is slurm/JOB.out"),
    "an option of megarl": (["--sbatch=-p high"], "'-phigh': an option of megarl slurm: give it there"),
    "an option of another name": (["--sbatch=--gres=gpu:8"], "'--gres=gpu:8': --nodes and --gpus-per-node say how large"),
    "the end of options": (["--sbatch=--hold --"], "--sbatch '--': "),
    "a way to call": (["--sbatch=--wrap=true"], "'--wrap=true': it changes how sbatch is called"),
    "a dependency of one of two": (
        ["--chain", "2", "--sbatch=--dependency=afterok:1?afterok:2"],
        "--sbatch --dependency=afterok:1?afterok:2: alternatives (?) cannot be joined with singleton (--chain)",
    ),
    "a shorter time": (["--sbatch=--time-min=5"], "--sbatch '--time-min=5' is 300 s, of which --grace 600"),
    "another cluster": (["cluster.address=head:6379"], "cluster.address and cluster.allocation are the job's own"),
    "nodes that do not reach each other": (["cluster.interface=null"], "cluster.interface: required on 2 nodes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(
    name: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, line = BAD[name]
    monkeypatch.setenv("PATH", "/nowhere")  # and there no sinfo
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    command = [str(tmp_path / "job.yaml"), "cluster.interface=eth0", "--nodes", "2", "--dry-run", *arguments]
    if not arguments:
        assert main(command) == 0
        said = capsys.readouterr()
        assert line in said.err and "#SBATCH --nodes=2\n" in said.out
    else:
        with pytest.raises(ConfigError, match=re.escape(line)):
            main(command)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_address_auto_is_the_jobs_own_cluster(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """cluster.address=auto, as the examples for several nodes have it, is left out of what the job runs."""
    (tmp_path / "count").write_text("0")
    said = {"scontrol": PARTITION, "sinfo": "1|(null)\n1|(null)"}
    scripts = {command: f"#!/bin/sh\nprintf '%s\\n' '{text}'\n" for command, text in said.items()}
    for command, script in {**scripts, "sbatch": SBATCH.format(count=tmp_path / "count"), "squeue": "#!/bin/sh\n"}.items():
        (tmp_path / command).write_text(script)
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    assert main([str(tmp_path / "job.yaml"), "cluster.address=auto", "cluster.interface=eth0", "--nodes", "2"]) == 0
    assert "submitted job 101" in capsys.readouterr().out
    [kept] = (tmp_path / "runs").glob("*/slurm/submitted-1/config.yaml")
    config = load(kept, [f"cluster.allocation={tmp_path}"], TrainConfig)  # as slurm/head.sh starts it
    assert config.cluster.address is None and config.cluster.allocation == tmp_path


SBATCH = """#!/bin/sh
[ "$1" = --test-only ] && exit 0
n=$(($(cat {count}) + 1))
echo $n > {count}
[ $n -lt 3 ] || {{ echo "sbatch: error: Batch job submission failed: job limit" >&2; exit 1; }}
echo "$((100 + n));cluster"
"""


@pytest.mark.parametrize("taken", [0, 2])
def test_a_chain_that_breaks_off_names_the_jobs_already_submitted(
    taken: int, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "count").write_text(str(2 - taken))
    (tmp_path / "sbatch").write_text(SBATCH.format(count=tmp_path / "count"))
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho '7|COMPLETING|0:10|1:00|1|n1|{tmp_path}/runs/job/slurm/submitted-1/job.sbatch'\n")
    for command in ("sbatch", "squeue"):
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    config = load(tmp_path / "job.yaml", [], TrainConfig)
    with pytest.raises(ConfigError) as refused:
        submit(replace(JOB, chain=4, nodes=1, directory=config.directory), config)
    said = "slurm: sbatch: sbatch: error: Batch job submission failed: job limit"
    chain = "; 2 of --chain 4 are submitted: 101 102 (scancel 101 102 takes them back)"
    assert str(refused.value) == said + (chain if taken else "")


def test_gpus_with_a_cpu_build_of_torch_are_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = replace(JOB, python=sys.executable)
    with pytest.raises(ConfigError, match=r"^slurm: this Python has torch's CPU build: bash tools/setup.sh --gpu, then .venv-gpu/bin/meg"):
        check_python(here, "2.13.0+cpu")
    check_python(here, "2.13.0")
    for job in (replace(here, gpus_per_node=0), replace(here, container="image"), JOB):
        check_python(job, "2.13.0+cpu")
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    asked = [
        "cluster.gpus=true",
        "rollout.kv_cache_mb=null",
        "model.dtype=bfloat16",
        "sync.transport=nccl",
        "--nodes",
        "1",
        "--gpus-per-node",
        "2",
        "--dry-run",
    ]
    if version("torch").endswith("+cpu"):
        assert main([str(tmp_path / "job.yaml"), *asked]) == 0, "no Slurm answers: this Python is not the nodes'"
        assert "not checked: the nodes' Python: slurm: this Python has torch's CPU build" in capsys.readouterr().err
        assert main([str(tmp_path / "job.yaml"), *asked, "--python", "/env/bin/python"]) == 0
        assert "python=/env/bin/python" in capsys.readouterr().out


PASSED = {
    "a dependency": (JOB, ["--dependency=afterok:7"], ["--dependency=afterok:7"]),
    "two dependencies": (JOB, ["-d afterok:7", "--depend afterany:8"], ["--dependency=afterok:7,afterany:8"]),
    "a dependency of a chain": (replace(JOB, chain=2), ["--dependency=afterok:7"], ["--dependency=afterok:7,singleton"]),
    "the chain's own": (replace(JOB, chain=2), ["--dependency=singleton"], ["--dependency=singleton"]),
    "memory": (JOB, ["--mem-per-cpu=4G"], ["--mem-per-cpu=4G"]),
    "no environment": (JOB, ["--export=NONE"], ["--export=NONE"]),
    "others": (JOB, ["--hold", "--comment='a b'", "-C h100", "--gres=tmp:1"], ["--hold", "--comment=a b", "-Ch100", "--gres=tmp:1"]),
}


@pytest.mark.parametrize("name", PASSED)
def test_the_users_sbatch_options_are_merged_with_the_jobs(name: str) -> None:
    job, own, words = PASSED[name]
    usual, now = options(job), options(replace(job, sbatch=own))
    assert set(words) <= set(now) and len(now) == len(set(now))
    assert {word.partition("=")[0] for word in usual if word not in now} <= {"--dependency", "--mem", "--export"}


def test_slurm_variables_set_defaults_only(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do those of the allocation from which a job is submitted: they would be limits of its steps."""
    for command in ("sbatch", "squeue", "scontrol", "sinfo"):
        said = {"scontrol": PARTITION.replace("TotalNodes", "MaxTime=1-0 TotalNodes"), "sinfo": "2|(null)\n2|(null)", "sbatch": "7"}
        (tmp_path / command).write_text(
            f"#!/bin/sh\necho {command} \"$@\" >>{tmp_path}/calls\nenv >>{tmp_path}/env\nprintf '%s\\n' '{said.get(command, '')}'\n"
        )
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    foreign = {"SBATCH_EXPORT": "NONE", "SBATCH_QOS": "low", "SLURM_MEM_PER_CPU": "10", "SLURM_JOB_ID": "3", "SRUN_CPUS_PER_TASK": "1"}
    foreign |= {"SQUEUE_STATES": "FAILED", "SINFO_PARTITION": "x", "SLURMD_NODENAME": "n9", "SCONTROL_ALL": "1"}
    for variable, value in {**foreign, "SBATCH_PARTITION": "main", "SBATCH_TIMELIMIT": "7", "SLURM_CONF": "/its/conf"}.items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    arguments = [str(tmp_path / "job.yaml"), "--nodes", "1"]
    with pytest.raises(ConfigError, match="--time 7 is 420 s, of which --grace 600"):
        main(arguments)
    assert main([*arguments, "--time", "4:00:00"]) == 0
    calls, variables = (tmp_path / "calls").read_text().splitlines(), (tmp_path / "env").read_text().splitlines()
    submissions = [set(shlex.split(call)) for call in calls if call.startswith("sbatch")]
    assert len(submissions) == 2, "a trial, and the job"
    assert all({"--partition=main", "--qos=low", "--time=4:00:00", "--export=ALL", "--requeue"} <= words for words in submissions)
    assert "SLURM_CONF=/its/conf" in variables and not [line for line in variables if line.split("=")[0] in foreign]
    assert "megarl: SBATCH_EXPORT: not used, the options of megarl slurm decide" in capsys.readouterr().err


LIMITED = Partition("p", 4, ((64, 8),) * 4, default_time=1800, max_time=7200, accounts=("prod",), qos=("long", "high"))
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "in order": ({"account": "prod", "time": "1:00:00"}, {}, None),
    "its default time is enough": ({}, {}, None),
    "a default time below the grace": ({}, {"default_time": 660}, "no --time: partition p ends a job after 660 s (DefaultTime), of which"),
    "a longest time below the grace": ({}, {"default_time": 600, "max_time": 600}, "after 600 s (MaxTime), of which --grace 600"),
    "too long": ({"time": "3:00:00"}, {}, "--time 3:00:00 is 10800 s: partition p allows 7200 s (MaxTime)"),
    "without end": ({"time": "UNLIMITED"}, {}, "--time UNLIMITED is no limit: partition p allows 7200 s (MaxTime)"),
    "as long as it likes": ({"time": "9-0"}, {"default_time": None, "max_time": None}, None),
    "drained": ({}, {"state": "DRAIN"}, "partition p is drain: it starts no jobs (State)"),
    "another account": ({"account": "Dev"}, {}, "--account dev: partition p takes jobs of prod (AllowAccounts)"),
    "an account below": ({"account": "team"}, {}, None),
    "a denied account": ({"account": "dev"}, {"accounts": None, "denied": ("dev",)}, "takes none of its jobs (DenyAccounts)"),
    "another QOS": ({"qos": "low"}, {}, "--qos low: partition p takes jobs of long, high (AllowQos)"),
    "one of several": ({"qos": "low,Long"}, {}, None),
    "a denied QOS": ({"qos": "low"}, {"qos": None, "denied_qos": ("low",)}, "--qos low: partition p takes none of its jobs (DenyQos)"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_job_beyond_the_limits_of_its_partition_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, changes, line = LIMITS[name]
    (tmp_path / "sacctmgr").write_text("#!/bin/sh\ncase $* in *=team*) echo prod ;; *=prod*) echo root ;; esac\n")
    (tmp_path / "sacctmgr").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    job, partition = replace(JOB, **asked), replace(LIMITED, **changes)
    if line is None:
        check_limits(job, partition)
    else:
        with pytest.raises(ConfigError, match=re.escape(line)):
            check_limits(job, partition)


def test_a_partition_that_is_too_small_is_refused_with_both_numbers() -> None:
    partition = Partition("main", nodes=3, sizes=((64, 8), (64, 8), (64, 4)))
    check_partition(replace(JOB, nodes=2), partition)
    with pytest.raises(ConfigError, match="--gpus-per-node 16: a node of partition main has 8"):
        check_partition(replace(JOB, gpus_per_node=16), partition)
    with pytest.raises(ConfigError, match="--nodes 2 and --spare 1: partition main has 2 with 8 GPUs"):
        check_partition(replace(JOB, nodes=2, spare=1), partition)
    with pytest.raises(ConfigError, match=r"--nodes 2: partition main gives a job 1 \(MaxNodes\)"):
        check_partition(replace(JOB, nodes=2), replace(partition, max_nodes=1))


PARTITION = "PartitionName=main Default=YES TotalNodes=2"
ANSWERS = {
    "no node": ((PARTITION.replace("2", "0"), ""), "--nodes 4: partition main has 0"),
    "no number of nodes": (
        ("PartitionName=main Default=YES", "64|gpu:8"),
        "cannot read what scontrol and sinfo say of partition .*: .*Default",
    ),
    "no default": (("PartitionName=main TotalNodes=2", "64|gpu:8"), "no --partition, and no default one: this cluster has main"),
    "nodes of text": ((PARTITION, "many|gpu:8"), "cannot read what scontrol and sinfo say of partition .*: .*many"),
    "nodes of one column": ((PARTITION, "64\n64|gpu:8"), "cannot read what scontrol and sinfo say of partition .*: .*64"),
    "nothing": (("", ""), "no --partition, and no default one: this cluster has none"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_unusable_answers_of_slurm_are_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, line = ANSWERS[name]
    for command, text in zip(("scontrol", "sinfo"), said, strict=True):
        (tmp_path / command).write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match=rf"^slurm: .*{line}.*$"):
        check_partition(replace(JOB, gpus_per_node=0), partition_of(replace(JOB, gpus_per_node=0)))


@pytest.mark.parametrize(("types", "gpus"), [("(null)", ""), ("gpu,shard", "gpu:h100:2")])
def test_slurm_is_asked_for_gpus_where_it_counts_them_and_nodes_without_do_not_matter(
    types: str, gpus: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n[ $2 = config ] && echo 'GresTypes               = {types}' || echo '{PARTITION}'\n")
    nodes = [f"96|{gpus}", "1|(null)" if gpus else "96|(null)"]
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\nprintf '%s\\n' '{nodes[0]}' '{nodes[1]}'\n")
    for command in ("scontrol", "sinfo"):
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=tiny_model))
    places = ("cluster.gpus=true", "sync.transport=nccl", "rollout.kv_cache_mb=null")
    assert main([str(tmp_path / "job.yaml"), *places, "--nodes", "1", "--gpus-per-node", "2", "--python", "python", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert ("#SBATCH --gpus-per-node=2\n" in said) == bool(gpus) and "\ngpus=2\n" in said


@pytest.mark.parametrize(
    ("given", "seconds"), [("90", 5400), ("10:30", 630), ("2:00:00", 7200), ("1-0", 86400), ("2-3:04:05", 183845), ("UNLIMITED", None)]
)
def test_time_limits_are_read_as_slurm_reads_them(given: str, seconds: int | None) -> None:
    assert replace(JOB, time=given).seconds == seconds


def test_verbs_that_save_nothing_are_not_requeued() -> None:
    [named] = re.findall(r"^ +([a-z| ]+)\) say .* saves nothing", (templates() / TEMPLATE).read_text(), re.MULTILINE)
    configs: dict[str, Any] = {name: find(verb.config) for name, verb in VERBS.items()}
    assert set(named.split(" | ")) == {name for name, config in configs.items() if not issubclass(config, TrainingSettings)}
