"""Wait until the nodes of an allocation have joined the driver's session, and report which have not."""

import sys
import time
from collections.abc import Mapping

from ray.exceptions import RayError

from megarl.cluster import watch
from megarl.cluster.allocation import Allocation
from megarl.cluster.on_node import live_nodes
from megarl.cluster.roster import NOTICE_S
from megarl.errors import Stopped

POLL_S = 0.2
MISSING = "is missing"  # and may still join
SPARE_S = 30.0  # how long to wait for spare nodes once there are enough


class TooFewNodes(Stopped):
    """Fewer nodes than the run needs have joined, or passed the test."""

    def __init__(self, message: str, bad: Mapping[str, str]) -> None:
        super().__init__(f"{message}: {'; '.join(f'{name} {why}' for name, why in bad.items())}")
        self.bad = bad


def wait_for_nodes(allocation: Allocation, gpus: bool, timeout_s: float) -> dict[str, str]:
    """Wait until every node of the allocation that can join has joined, or until SPARE_S after enough of them have.

    Args:
        allocation: the job's nodes.
        gpus: whether each node must also have the allocation's number of GPUs.
        timeout_s: for as many nodes as the run needs.

    Returns:
        What is wrong with each of the other nodes, by name.

    Raises:
        TooFewNodes: fewer nodes than the run needs have joined in time, or ever can; names those that are to blame.
    """
    start, enough = time.monotonic(), None
    while True:
        watch.check("waiting for nodes", {})
        node_gpus = {node["NodeName"]: int(node["Resources"].get("GPU", 0)) for node in live_nodes().values()}
        bad = _lacking(allocation, node_gpus, allocation.gpus if gpus else 0)
        unfit = {name: why for name, why in bad.items() if why != MISSING}
        whole, now = len(allocation.nodes) - len(bad), time.monotonic()
        enough = (enough or now) if whole >= allocation.needed else None
        if enough is not None and (bad == unfit or now - enough > SPARE_S):
            return bad
        if len(allocation.nodes) - len(unfit) < allocation.needed:
            of = f"{len(unfit)} of {len(allocation.nodes)} nodes cannot take part"
            raise TooFewNodes(f"{of}, and the run needs {allocation.needed}", unfit)
        if enough is None and now - start > timeout_s:
            of = f"{whole} of {len(allocation.nodes)} nodes have joined within cluster.start_timeout_s={timeout_s:g}"
            raise TooFewNodes(f"{of}, and the run needs {allocation.needed}", bad)
        time.sleep(POLL_S)


def _lacking(allocation: Allocation, node_gpus: Mapping[str, int], gpus: int) -> dict[str, str]:
    """What is wrong with each node that is absent or short of GPUs. `node_gpus`: the number of GPUs of each node that has joined."""
    excluded = allocation.all_excluded()
    absent = {name: excluded.get(name, MISSING) for name in allocation.nodes if name not in node_gpus}
    short = {name: f"has {has} of {gpus} GPUs" for name, has in node_gpus.items() if has < gpus}
    return {name: (absent | short)[name] for name in allocation.nodes if name in absent or name in short}


def present(allocation: Allocation) -> dict[str, str]:
    """The ids of the allocation's live nodes by name, the head first."""
    node_ids = {node["NodeName"]: node["NodeID"] for node in live_nodes().values()}
    return {name: node_ids[name] for name in allocation.nodes if name in node_ids}


def died(before: set[str]) -> dict[str, str]:
    """Return which of the nodes in `before` have died, each with that word as the reason. Waits until Ray would have noticed.

    Where Ray does not say which nodes are alive, none is known to have died.
    """
    deadline = time.monotonic() + NOTICE_S
    dead = set[str]()
    while not dead and len(before) > 1 and time.monotonic() < deadline:
        try:
            dead = before - {node["NodeName"] for node in live_nodes().values()}
        except (RayError, RuntimeError):
            return {}
        time.sleep(POLL_S)
    return dict.fromkeys(sorted(dead), "died")


def tell(line: str) -> None:
    """Print a line about the allocation."""
    print(f"megarl: {line}", file=sys.stderr, flush=True)
