"""What of Ray 2.60's start does not fit a training run, mended in one place: servers nobody uses, and limits that nobody can set."""

from __future__ import annotations

import os
import time
from typing import Any

import ray._private.services as services
from ray._private.node import Node

from megarl.patching import expect

_get_node, _start_ray_processes = services.get_node, Node.start_ray_processes


class RayNotStarted(Exception):
    """Ray's own processes have ended, or are late. Not a RuntimeError: `Node` would go on from that."""


def mend(timeout_s: float) -> None:
    """Prepares `ray.init` to start a session of its own, all of whose waits are bounded by `timeout_s`."""
    # The dashboard's server, which Ray starts and waits for without a dashboard too, and the autoscaler of a cluster that does not grow:
    # a quarter of the CPU time of its start.
    Node.start_api_server = Node.start_monitor = _start_nothing
    # Ray gives each of its processes 30 to 60 s to appear, which a busy machine exceeds.
    seconds = round(min(max(timeout_s, 1), 1e6))
    os.environ.update(
        RAY_gcs_server_port_wait_time_s=str(seconds),
        RAY_worker_register_timeout_seconds=str(seconds),
        RAY_agent_register_timeout_ms=str(1000 * seconds),
    )
    _wait_for_raylet(timeout_s)


def _wait_for_raylet(timeout_s: float) -> None:
    """node.py:428 gives the raylet 30 s to register, fixed, even where it has ended; the call that it repeats until then waits itself."""
    expect(Node.__init__, "self.start_ray_processes()", "raylet_start_wait_time_s = 30", "services.get_node(", "except RuntimeError as e:")
    started: list[Any] = []

    def start_ray_processes(self: Any) -> None:
        started.append(self)
        _start_ray_processes(self)

    def get_node(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return _get_node(gcs_address, node_id)
            except RuntimeError as error:
                ended = [kind for node in started for kind, _ in node.dead_processes()]
                if ended:
                    raise RayNotStarted(f"Ray's {' and '.join(ended)} ended at the start") from error
                if time.monotonic() > deadline:
                    raise RayNotStarted(f"cluster.start_timeout_s: Ray's raylet did not register within {timeout_s:g} s") from error
            time.sleep(0.02)

    Node.start_ray_processes, services.get_node = start_ray_processes, get_node


def _start_nothing(*_: Any, **__: Any) -> None:
    """In the place of a process of Ray's that a run has no use for."""
