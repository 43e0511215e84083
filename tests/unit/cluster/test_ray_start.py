"""A private Ray session starts on a busy machine too: its processes have `cluster.start_timeout_s`, not Ray's own fixed limits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# Ray's clock runs a hundred times faster than the machine's, and the raylet takes 2 s to register, as if it were minutes.
START = """
    import os, signal, sys, time, types
    import psutil
    import ray._private.node as node
    import ray._private.services as services

    def registered(address, identity, known=services.get_node, begun=[]):
        begun.append(time.monotonic())
        if sys.argv[2] == "dies":
            [raylet] = [child for child in psutil.Process().children() if child.name() == "raylet"]
            raylet.kill()
        if time.monotonic() - begun[0] < 2:
            raise RuntimeError("not there")
        return known(address, identity)

    services.get_node = registered
    node.time = types.SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: 100 * time.monotonic())

    from megarl.config import ClusterSettings
    from megarl.cluster.session import ray_session

    with ray_session(ClusterSettings(gpus=False, start_timeout_s=float(sys.argv[1])), actors=1):
        print("started")
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
    assert done.returncode == 0 and "started" in done.stdout, done.stderr


def test_a_raylet_that_does_not_come_is_told_with_the_limit() -> None:
    line = refusal(start(0.5, "is slow"))
    assert line == "megarl.cluster.session.ClusterError: cluster.start_timeout_s: Ray's raylet did not register within 0.5 s"


def test_a_raylet_that_dies_is_told_at_once() -> None:
    line = refusal(start(1e6, "dies"))
    assert line.startswith("megarl.cluster.session.ClusterError: Ray's raylet ended at the start (exit code -9; ")
