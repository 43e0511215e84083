"""Tasks and actors of Ray that run on a certain node."""

from __future__ import annotations

from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def on(node: str) -> dict[str, Any]:
    """Options of what runs on this node, beside whatever runs there."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
