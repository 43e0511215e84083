"""What a node of a job does that watches the first one. Slurm's commands are stubs; tests/slurm/ has the real ones."""

import subprocess
from pathlib import Path

import pytest

from megarl.slurm.script import templates

THERE, LOST = "127.0.0.1", "255.255.255.255"  # a first node that refuses a connection, and one to which there is none
SCONTROL = """
case $* in
    "show hostnames"*) tr , "\\n" <<<"$3" ;;
    "--oneliner show job 7")
        echo >>asked
        case $(wc -l <asked) in
            1) nodes=$FIRST,n2,n3 ;;
            2) exit 1 ;; # it does not answer
            *) nodes=$(<left) ;; # it may have given a node up
        esac
        restarts=$(cat requeued 2>/dev/null || echo 0)
        echo "JobId=7 JobName=a JobState=RUNNING Restarts=$restarts ReqNodeList=$FIRST NodeList=$nodes BatchHost=a"
        ;;
    *)
        echo "$@" >>calls
        ((ANSWER == 1)) || echo 1 >requeued
        exit "$ANSWER"
        ;;
esac
"""
STUBS = {
    "scontrol": SCONTROL,
    "scancel": 'echo cancel "$@" >>calls; echo 1 >requeued',
    "sleep": 'echo "$1" >>slept; (($(wc -l <slept) < 7))',  # then Slurm ends the step
}


@pytest.mark.parametrize(
    ("first", "left", "restart", "restarts", "answer", "calls"),
    [
        (LOST, "n2,n3", 0, 2, 0, ["requeue 7"]),
        (LOST, "n2,n3", 0, 1, 1, ["requeue 7", "cancel --state=RUNNING 7"]),
        (LOST, "n2,n3", 0, 1, 124, ["requeue 7"]),  # it has done so, and has not answered in time
        (LOST, "n2,n3", 0, 0, 0, ["cancel 7"]),
        (LOST, "n2,n3", 0, -1, 0, ["cancel 7"]),  # Slurm itself has queued it again more often
        (LOST, "n2,n3", 1, 1, 0, []),  # another start of the job
        (LOST, "", 0, 1, 0, []),
        (LOST, f"{LOST},n2", 0, 1, 0, []),  # Slurm does not give it up
        (THERE, "n2,n3", 0, 1, 0, []),  # its script goes on
    ],
)
def test_the_guard_requeues_if_the_first_node_is_lost_and_a_restart_remains(
    first: str, left: str, restart: int, restarts: int, answer: int, calls: list[str], tmp_path: Path
) -> None:
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "left").write_text(left)
    variables = {"FIRST": first, "ANSWER": str(answer), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart)}
    done = subprocess.run(
        ["bash", templates() / "guard.sh", first, str(restarts)],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    called = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert called == calls, done.stderr
    assert (f"{first}, the first node, is lost" in done.stdout) == bool(calls)
    pauses = list(map(int, (tmp_path / "slept").read_text().split()))
    assert len(pauses) == 7 and all(30 <= pause < 60 for pause in pauses), "it asks as long as it lasts"
