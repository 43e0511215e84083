"""What a job's other nodes run: `python -m megarl.cluster.join DIRECTORY` joins the driver's session, and ends with it."""

import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from ray._private.node import Node
from ray._private.parameter import RayParams

from megarl.cluster.allocation import Allocation, HeadNode, cpus_here, forget_launcher
from megarl.cluster.machine import gpus_here
from megarl.cluster.membership import tell
from megarl.cluster.session import hosting, interface_address
from megarl.host.network import own_address
from megarl.host.scratch import sweep
from megarl.text.display import one_line

POLL_S = 0.5
WAIT_S = 3600.0  # for the driver, which reads its prompts first
SHOWN = 200  # characters of the error of a failed start


def main(directory: Path) -> int:
    """Join the session; return 0 once it is over, and 1 if there is none or this node's part of it ends earlier.

    A node that cannot join tells the driver why, since the driver would otherwise wait for it, and raises the error.
    """
    allocation, cpus, gpus = Allocation.read(directory), cpus_here(), gpus_here()
    name, head = allocation.here, None
    forget_launcher()
    with ExitStack() as ending:
        try:
            sweep()
            head = _wait_for_head(allocation)
            if head is None:
                tell(f"{name}: no session to join within {WAIT_S:g} s")
                return 1
            scratch = ending.enter_context(hosting(head.start_timeout_s, head.interface, head.token, allocation))
            address = own_address(head.address.rpartition(":")[0]) if head.interface is None else interface_address(head.interface)
            parameters = RayParams(
                gcs_address=head.address,
                node_ip_address=address,
                node_name=name,
                num_cpus=cpus,
                num_gpus=gpus if head.gpus else 0,
                object_store_memory=head.object_store_mb << 20,
                temp_dir=str(scratch.path / "r"),
            )
            node = Node(parameters, head=False, shutdown_at_exit=False)
        except Exception as error:
            if head is None or allocation.head() == head:  # otherwise the session has ended meanwhile
                allocation.exclude(name, f"cannot join: {one_line(str(error), SHOWN)}")
            raise
        ending.callback(node.kill_all_processes, check_alive=False, allow_graceful=False, wait=True)
        tell(f"{name} ({address}, {cpus} CPUs, {parameters.num_gpus} GPUs) has joined {head.address}")
        return _stay(allocation, name, head, node)


def _stay(allocation: Allocation, name: str, head: HeadNode, node: Node) -> int:
    """Wait until this node's part of the session is over, and return the exit status for `main`."""
    answered_at = time.monotonic()
    while True:
        try:
            over, why = allocation.is_over() or allocation.head() != head, allocation.excluded(name)
            answered_at = time.monotonic()
        except OSError:  # a shared disk may fail for a moment
            if time.monotonic() - answered_at > head.start_timeout_s:
                raise
            over, why = False, None
        if over:
            return 0
        if why:
            tell(f"{name} leaves: {why}")
            return 1
        if dead_processes := node.dead_processes():
            kinds = ", ".join(f"{kind} (exit code {process.returncode})" for kind, process in dead_processes)
            tell(f"{name}: Ray's {kinds} ended")
            return int(allocation.head() == head)
        time.sleep(POLL_S)


def _wait_for_head(allocation: Allocation) -> HeadNode | None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with suppress(OSError):  # a shared disk may fail for a moment
            if head := allocation.head():
                return head
        time.sleep(POLL_S)
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
