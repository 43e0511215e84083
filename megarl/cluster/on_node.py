"""Ray tasks and actors that run on a given node."""

from __future__ import annotations

from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def on(node: str) -> dict[str, Any]:
    """Ray's options for running a task or actor on this node, beside whatever else runs there."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
