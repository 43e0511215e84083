"""Reserves resources for actors in a Ray cluster."""

from __future__ import annotations

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.actor_group import WorkerLate


def reserve(bundles: list[dict[str, float]], timeout_s: float) -> list[PlacementGroupSchedulingStrategy]:
    """Reserves the bundles, neighbours on one node where possible, so that consecutive ranks share a machine.

    Raises WorkerLate with what was asked and what the cluster has.
    """
    group: PlacementGroup = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_s):
        asked = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in sorted({key for bundle in bundles for key in bundle})}
        raise WorkerLate(f"cluster: {asked} not free within {timeout_s:g} s; the cluster has {ray.cluster_resources()}")
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(len(bundles)), key=lambda index: (nodes[index], index))
    return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in order]
