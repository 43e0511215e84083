"""Patches of Ray 2.60's start, where it does not fit a training run: servers that nobody uses, and time limits that no setting changes."""

import os
import re
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray._private.services as services
from ray._private.node import Node
from ray._raylet import GcsClient, NodeID, persist_port
from ray.exceptions import RpcError

from megarl.host import termination
from megarl.text.display import one_line
from megarl.upstream.expect import expect

AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")  # options of the raylet
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
LOOK_MS = 20  # how often Ray's server is asked whether the raylet has registered, and the object store whether it is there
STORE_S = 60  # for the object store to take its memory; 0.7 s for each GB were measured in a virtual machine
ANSWER_S = 1.0  # for its answer
NO_PORT = -1  # what Ray's own agent reports when it has no server (dashboard/agent.py:104)
LOWEST_PORT = 10_000
BAND = 1_000  # the number of ports at which other nodes reach the processes of one node

ASKED = "ray._private.utils.get_dashboard_dependency_error"
_get_node, _start_ray_processes, _start_ray_process = services.get_node, Node.start_ray_processes, services.start_ray_process


class RayNotStarted(Exception):
    """Ray's own processes have ended, or are late. Not a RuntimeError, because `Node` would catch that and continue."""


def mend(timeout_s: float, one_of_many: bool = False) -> None:
    """Prepare Ray to start a session's processes on this machine, with every wait bounded by `timeout_s`.

    With `one_of_many`, on a node of a job, every port that other nodes connect to is chosen here, below the kernel's ephemeral ports.
    Neither Ray's processes nor what they start receive SIGTERM.
    """
    # Neither the dashboard's server, which Ray starts and waits for even without a dashboard, nor the autoscaler, since the cluster does
    # not grow: together a quarter of the CPU time of Ray's start.
    Node.start_api_server = Node.start_monitor = _start_nothing
    # Ray gives each of its processes 30 to 60 s to come up, which a busy machine exceeds.
    seconds = round(min(max(timeout_s, 1), 1e6))
    os.environ.update(
        RAY_gcs_server_port_wait_time_s=str(seconds),
        RAY_worker_register_timeout_seconds=str(seconds),
        RAY_agent_register_timeout_ms=str(1000 * seconds),
        # For the raylet to reach its object store, which first takes its memory: Ray tries ten times, once a second.
        RAY_raylet_client_num_connect_attempts=str(1000 * STORE_S // LOOK_MS),
        RAY_raylet_client_connect_timeout_milliseconds=str(LOOK_MS),
    )
    if one_of_many:
        os.environ["RAY_GCS_SERVER_PORT"] = str(_free_ports(1)[0])
    _start_without_agents()
    _wait_for_raylet(timeout_s, chosen_ports=one_of_many)


def _start_without_agents() -> None:
    """Replace the raylet's two agents, without which it does not start, by processes that do nothing and end with it.

    One agent serves the dashboard, the other makes environments for actors that ask for them: half of the CPU time of Ray's start.
    """
    condition, agents = f"if {ASKED}() is not None:", (f'"{agent}={{}}".format(' for agent in AGENTS)
    expect(services.start_raylet, condition, *agents, "start_ray_process(")
    # The original imports aiohttp to find out whether an agent could serve the dashboard, which takes half a second.
    services.ray._private.utils.get_dashboard_dependency_error = _start_nothing
    # Keeps the standard input of these processes open for as long as the raylet lives.
    os.environ.update(RAY_enable_pipe_based_agent_to_parent_health_check="1")

    def start_ray_process(command: list[str], *arguments: Any, **options: Any) -> Any:
        without = [f"{name}=cat" if (name := word.partition("=")[0]) in AGENTS else word for word in command]
        with termination.withheld():
            started = _start_ray_process(without, *arguments, **options)
        started.process.terminate = started.process.kill  # Ray would wait a second for each of them to end by SIGTERM
        return started

    services.start_ray_process = start_ray_process


def _wait_for_raylet(timeout_s: float, chosen_ports: bool) -> None:
    """Replace Ray's wait for the raylet to register: node.py:428 waits a fixed 30 s, even if it has ended, and looks once a second."""
    expect(Node.__init__, "self.start_ray_processes()", "raylet_start_wait_time_s = 30", "services.get_node(", "except RuntimeError as e:")
    started: list[Any] = []

    def start_ray_processes(self: Any) -> None:
        started.append(self)
        for name in PORTS:  # the raylet waits until its agents have written their ports to these files
            persist_port(self._session_dir, self._node_id, name, NO_PORT)
        if chosen_ports:
            _choose_ports(self._ray_params)
        _start_ray_processes(self)

    def get_node(gcs_address: str, node_id: str) -> Any:
        deadline, gcs = time.monotonic() + timeout_s, GcsClient(address=gcs_address)
        while not _registered(gcs, node_id):
            for node in started:
                for kind, process in node.dead_processes():
                    raise RayNotStarted(f"Ray's {kind} ended at the start ({_last_words(node, kind, process)})")
            if time.monotonic() > deadline:
                raise RayNotStarted(f"cluster.start_timeout_s: Ray's raylet did not register within {timeout_s:g} s")
            time.sleep(LOOK_MS / 1000)
        return _get_node(gcs_address, node_id)

    Node.start_ray_processes, services.get_node = start_ray_processes, get_node


def _registered(gcs: GcsClient, node_id: str) -> bool:
    with suppress(RpcError):  # Ray's server has ended, or is late
        return NodeID.from_hex(node_id) in gcs.get_all_node_info(timeout=ANSWER_S)
    return False


def _choose_ports(parameters: Any) -> None:
    """Choose the raylet's own ports, and for the workers that it starts a band above all ports that are chosen one by one."""
    parameters.node_manager_port, parameters.object_manager_port = _free_ports(2)
    middle, end = _range()[1:]
    parameters.min_worker_port = middle + secrets.randbelow(end - BAND - middle)
    parameters.max_worker_port = parameters.min_worker_port + BAND


def _range() -> tuple[int, int, int]:
    """The range of ports to choose from, as first, middle, end; below the kernel's ephemeral ports if there are enough."""
    anybodys = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = anybodys if anybodys - LOWEST_PORT > 4 * BAND else 1 << 16
    return LOWEST_PORT, (LOWEST_PORT + end) // 2, end


def _free_ports(count: int) -> list[int]:
    """Choose ports in the lower half of the range on which nothing listens."""
    first, middle, _ = _range()
    ports: list[int] = []
    while len(ports) < count:
        port = first + secrets.randbelow(middle - first)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            if port not in ports:
                ports.append(port)
    return ports


def _last_words(node: Any, kind: str, process: Any) -> str:
    """The exit code of one of Ray's processes, and its last message: the last error in its log, else the last line."""
    lines: list[str] = []
    for end in ("out", "err"):
        with suppress(OSError):
            lines += Path(node.get_logs_dir_path(), f"{kind}.{end}").read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.match(r"\[[^]]* [EFC] ", line)]  # "[2026-11-22 02:33:00,123 C 77 77] (raylet) file.cc:9: ..."
    messages = [line for line in errors or lines if line.strip()]
    return f"exit code {process.returncode}; {one_line(messages[-1]) if messages else 'its log is empty'}"


def _start_nothing(*_: Any, **__: Any) -> None:
    """Take the place of a process of Ray's that a run has no use for."""
