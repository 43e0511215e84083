"""Reserve places for actors in a Ray cluster."""

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from ray._private.state import state as ray_state
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster import watch
from megarl.cluster.actor_group import LOOK_S, WorkerLate
from megarl.cluster.on_node import live_nodes
from megarl.cluster.placement import Node, NoRoom, ProcessKind, place
from megarl.cluster.server import ask
from megarl.errors import Stopped

POLL_S, TELL_S = 0.2, 5.0  # how often the nodes are looked at; after how long the user is told that there is no room yet
NODE_LABEL = "ray.io/node-id"
DOING = "reserving places"


class NoNodes(Stopped):
    """The nodes of the cluster cannot hold the run, and no other node will join."""


def reserve(kinds: Sequence[ProcessKind], timeout_s: float, grows: bool) -> list[list[PlacementGroupSchedulingStrategy]]:
    """Reserve a place for every process on the nodes that `place` chooses, waiting for places that are not free yet.

    Args:
        kinds: the kinds of processes.
        timeout_s: for all of it.
        grows: whether other nodes may join the cluster; they are waited for.

    Returns:
        The scheduling strategies of the processes, for each kind.

    Raises:
        NoNodes: there is no room, and there will not be any.
        WorkerLate: there is no room in time. Both messages say what is asked for and what there is.
    """
    deadline = time.monotonic() + timeout_s
    places = _wait_for_places(kinds, deadline, timeout_s, grows)
    bundles = [{"CPU": 1.0, "GPU": float(kind.gpus)} if kind.gpus else {"CPU": 1.0} for kind in kinds for _ in range(kind.processes)]
    selector = [{NODE_LABEL: name} for name in chain(*places)]
    group = ask(DOING, partial(placement_group, bundles, strategy="PACK", bundle_label_selector=selector))
    if not _ready(group, deadline):
        ask(DOING, partial(remove_placement_group, group))
        raise WorkerLate(f"cluster: the places of {len(bundles)} processes were taken by others, and not free within {timeout_s:g} s")
    numbered = iter(range(len(bundles)))
    return [[PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=next(numbered)) for _ in names] for names in places]


def lost_nodes(places: Sequence[PlacementGroupSchedulingStrategy]) -> bool:
    """Whether a node on which places were reserved is gone."""
    living = live_nodes()
    return any(node not in living for node in nodes_of(places))


def nodes_of(places: Sequence[PlacementGroupSchedulingStrategy]) -> set[str]:
    """The nodes on which places are reserved."""
    tables = (ask(DOING, partial(placement_group_table, group)) for group in _groups(places))
    return {node for table in tables for node in table["bundles_to_node_id"].values()}


def release(places: Sequence[PlacementGroupSchedulingStrategy]) -> None:
    """Free reserved places, and end every actor in them."""
    for group in _groups(places):
        ask(DOING, partial(remove_placement_group, group))


def _groups(places: Sequence[PlacementGroupSchedulingStrategy]) -> list[PlacementGroup]:
    return list({place.placement_group.id: place.placement_group for place in places}.values())


def _wait_for_places(kinds: Sequence[ProcessKind], deadline: float, timeout_s: float, grows: bool) -> list[list[str]]:
    has_told, start = False, time.monotonic()
    while True:
        try:
            return place(kinds, free_nodes())
        except NoRoom as error:
            if not grows:
                _refuse_what_never_fits(kinds)
            if time.monotonic() > deadline:
                raise WorkerLate(f"cluster: {error}, after {timeout_s:g} s") from None
            if not has_told and time.monotonic() - start > TELL_S:
                has_told = True
                print(f"megarl: waiting up to {timeout_s:g} s for places: {error}", file=sys.stderr)
        watch.check(DOING, {})
        time.sleep(POLL_S)


def _ready(group: PlacementGroup, deadline: float) -> bool:
    while not group.wait(LOOK_S):
        watch.check(DOING, {})
        if time.monotonic() > deadline:
            return False
    return True


def _refuse_what_never_fits(kinds: Sequence[ProcessKind]) -> None:
    try:
        place(kinds, [Node(name, *_sizes(node["Resources"])) for name, node in live_nodes().items()])
    except NoRoom as error:
        raise NoNodes(f"cluster: {error}; no other node will join") from None


def free_nodes() -> list[Node]:
    """The live nodes of the cluster, with what each has free now."""
    free = ask(DOING, ray_state.available_resources_per_node)
    return [Node(name, *_sizes(free[name])) for name in live_nodes() if name in free]


def _sizes(resources: Mapping[str, float]) -> tuple[int, int]:
    """The CPUs and GPUs among a node's resources."""
    return int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
