"""What a node of a job does once its part of the session has ended. Slurm's commands are stubs; tests/slurm/ has the real ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megarl.slurm.script import templates

THERE, LOST = "127.0.0.1", "255.255.255.255"  # a first node that refuses a connection, and one to which there is none
STUBS = {
    "scontrol": 'if [[ $1 == show ]]; then tr , "\\n" <<<"$3"; else echo "$@" >>calls; exit "$(<requeued)"; fi',
    # Gives a node up in the end, and some time later ends itself.
    "squeue": 'echo >>asked; case $(wc -l <asked) in [123]) echo "$SLURM_JOB_NODELIST" ;; [456]) cat left ;; *) exit 1 ;; esac',
    "scancel": 'echo cancel "$@" >>calls',
    "sleep": "",
}


@pytest.mark.parametrize(
    ("first", "left", "restarts", "requeued", "calls"),
    [
        (LOST, "n2,n3", 2, 0, ["requeue 7"]),
        (LOST, "n2,n3", 1, 1, ["requeue 7", "cancel --state=RUNNING 7"]),
        (LOST, "n2,n3", 0, 0, ["cancel 7"]),
        (LOST, "n2,n3", -1, 0, ["cancel 7"]),  # Slurm itself has queued it again more often
        (LOST, "", 1, 0, []),  # another node has been quicker
        (LOST, f"{LOST},n2", 1, 0, []),  # Slurm does not give it up
        (THERE, "n2,n3", 1, 0, []),  # its script goes on
    ],
)
def test_it_queues_the_job_again_where_the_first_node_is_lost_and_a_restart_is_left(
    first: str, left: str, restarts: int, requeued: int, calls: list[str], tmp_path: Path
) -> None:
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "left").write_text(left)
    (tmp_path / "requeued").write_text(str(requeued))
    done = subprocess.run(
        ["bash", templates() / "worker.sh", tmp_path, "false", str(restarts)],  # false: the session has ended for this node
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"{first},n2,n3"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    called = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert called == calls and done.returncode == 1, done.stderr
    assert (f"{first}, the first node, is lost" in done.stdout) == bool(calls)
