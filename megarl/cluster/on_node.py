"""The nodes of a Ray session, and tasks and actors that run on a given one."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.server import ask


def live_nodes() -> dict[str, dict[str, Any]]:
    """The live nodes of the session, by id. Raises ProcessStalled where Ray's server does not answer."""
    return {node["NodeID"]: node for node in ask("looking for nodes", ray.nodes) if node["Alive"]}


def on(node: str) -> dict[str, Any]:
    """Ray's options for running a task or actor on this node, beside whatever else runs there."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
