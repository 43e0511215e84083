"""A private Ray session starts on a busy machine too: its processes have `cluster.start_timeout_s`, not Ray's own fixed limits."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Ray's clock runs a hundred times faster than the machine's, and the raylet takes 2 s to register, as if it were minutes.
START = """
    import os, signal, sys, time, types
    import psutil
    import ray._private.node as node

    from megarl.config import ClusterSettings
    from megarl.cluster import ray_start
    from megarl.cluster.session import ray_session

    def registered(gcs, identity, known=ray_start._registered, begun=[]):
        begun.append(time.monotonic())
        if sys.argv[2] != "is slow":
            [process] = [child for child in psutil.Process().children() if child.name() == sys.argv[2]]
            process.kill()
        return known(gcs, identity) and time.monotonic() - begun[0] > 2

    ray_start._registered = registered
    node.time = types.SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: 100 * time.monotonic())

    with ray_session(ClusterSettings(gpus=False, start_timeout_s=float(sys.argv[1])), actors=1):
        print("started", "with aiohttp" if "aiohttp" in sys.modules else "light")
"""


def start(timeout_s: float, raylet: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(START), str(timeout_s), raylet]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1 and "started" not in done.stdout
    return done.stderr.splitlines()[-1]


def test_a_slow_raylet_has_the_whole_start_limit() -> None:
    done = start(200, "is slow")
    assert done.returncode == 0 and done.stdout == "started light\n", done.stderr


def test_a_raylet_that_does_not_start_is_reported_with_the_limit() -> None:
    line = refusal(start(0.5, "is slow"))
    assert line == "megarl.cluster.session.ClusterError: cluster.start_timeout_s: Ray's raylet did not register within 0.5 s"


@pytest.mark.parametrize("process", ["raylet", "gcs_server"])
def test_a_process_that_dies_is_reported_at_once(process: str) -> None:
    line = refusal(start(1e6, process))
    assert line.startswith(f"megarl.cluster.session.ClusterError: Ray's {process} ended at the start (exit code -9; ")
