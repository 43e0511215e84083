"""Which nodes of an allocation reach each other, and how fast: a short test in processes of its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.actor_group import ActorGroup, end
from megarl.cluster.membership import TooFewNodes
from megarl.text import one_line

if TYPE_CHECKING:
    from megarl.parallel.links import Times

LINKS_S = 120.0  # for what ranks do together once their processes are there
SHOWN = 200  # characters of what a test failed with


def reach(
    names: Sequence[str], nodes: Mapping[str, str], needed: int, per_node: int, gpus: bool, timeout_s: float
) -> tuple[list[Times], dict[str, str]]:
    """Times the links between nodes.

    Args:
        names: of the nodes, the head first.
        nodes: Ray's, by name.
        needed: so many must reach each other, the head among them.
        per_node: ranks of each.
        gpus: a GPU for each rank.
        timeout_s: for the start of the ranks.

    Returns:
        The times of all ranks of the nodes that reach each other; and what is wrong with the others.

    Raises:
        TooFewNodes: of the nodes that are needed not all reach each other; names those that do not.
    """
    try:
        return _measured([nodes[name] for name in names], per_node, gpus, timeout_s), {}
    except Exception as error:  # a link that hangs is another error to each backend
        reason = one_line(f"{type(error).__name__}: {error}", SHOWN)
        broken = _broken(names, nodes, gpus, timeout_s)
        if not broken:
            raise
        alone = cut_off(names, broken)
        good = [name for name in names if name not in alone]
        if not alone or names[0] in alone or len(good) < needed:
            raise TooFewNodes(f"not all nodes reach each other ({reason})", alone or _ends(broken)) from error
    return _measured([nodes[name] for name in good], per_node, gpus, timeout_s), alone


def on(node: str) -> dict[str, Any]:
    """Options of what runs on this node, and takes nothing of it."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


class Linked:
    """One rank of the timing, in a process of its own."""

    def __init__(self, rank: int, world: int, per_node: int, gpus: bool, timeout_s: float) -> None:
        self._given = rank, world, per_node
        self._gpus, self._timeout_s = gpus, timeout_s
        self._store: Any = None

    def prepare(self) -> None:
        """Imports torch, which takes a slow disk long."""
        importlib.import_module("megarl.parallel.links")

    def listen(self) -> tuple[str, int]:
        from megarl.sync.store import listen_store

        host = ray.util.get_node_ip_address()
        self._store, port = listen_store(host, self._given[1], self._timeout_s)
        return host, port

    def measure(self, address: tuple[str, int]) -> Any:
        from megarl.parallel.links import measure
        from megarl.sync.store import connect_store

        store = self._store or connect_store(*address, self._given[1], self._timeout_s)
        return measure(*self._given, store, address[0], self._gpus, self._timeout_s)


def _measured(nodes: Sequence[str], per_node: int, gpus: bool, timeout_s: float) -> list[Times]:
    """The times of all ranks. Raises what one of them fails with, or WorkerLate where a link hangs."""
    world = len(nodes) * per_node
    actor: Any = ray.remote(Linked)
    limit_s = min(timeout_s, LINKS_S)
    actors = [
        actor.options(**on(nodes[rank // per_node]), num_gpus=int(gpus)).remote(rank, world, per_node, gpus, limit_s)
        for rank in range(world)
    ]
    try:
        group = ActorGroup("pre-flight", actors)
        group.call("prepare", timeout_s=timeout_s)
        [address] = ActorGroup("pre-flight", actors[:1]).call("listen", timeout_s=limit_s)
        return group.call("measure", address, timeout_s=limit_s)
    finally:
        end(actors)


def compared(times: Sequence[Times], nodes: int, factor: float) -> tuple[list[int], str]:
    """Which nodes are slow, as indices, and the times in words."""
    from megarl.parallel.links import slow

    per_node = len(times) // nodes
    best = [max(one.best_edge for one in times[n * per_node : (n + 1) * per_node]) for n in range(nodes)]
    reduce, to_all = max(one.all_reduce for one in times), max(one.all_to_all for one in times)
    edge = f", neighbours {1e3 * max(best):.1f} ms" if nodes > 1 else ""
    words = f"; {times[0].megabytes} MB over {len(times)} ranks: all-reduce {1e3 * reduce:.1f} ms, all-to-all {1e3 * to_all:.1f} ms{edge}"
    return slow(best, factor), words


def _broken(names: Sequence[str], nodes: Mapping[str, str], gpus: bool, timeout_s: float) -> list[tuple[str, str]]:
    """The neighbours that do not reach each other, where a test of all nodes together has failed: each two are tested alone."""
    from megarl.parallel.links import edges

    def works(edge: tuple[int, int]) -> bool:
        try:
            _measured([nodes[names[n]] for n in edge], 1, gpus, timeout_s)
        except Exception:
            return False
        return True

    found = list[tuple[str, str]]()
    for pairs in edges(len(names)):
        with ThreadPoolExecutor(len(pairs)) as threads:
            working = list(threads.map(works, pairs))
        found += [(names[a], names[b]) for (a, b), well in zip(pairs, working, strict=True) if not well]
    return found


def cut_off(names: Sequence[str], broken: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The nodes that reach neither of their neighbours, and whom they do not reach.

    Args:
        names: of the nodes, as in `links.edges`.
        broken: the neighbours that do not reach each other.
    """
    from megarl.parallel.links import edges

    reached = {names[n] for pairs in edges(len(names)) for edge in pairs if (names[edge[0]], names[edge[1]]) not in broken for n in edge}
    return {name: why for name, why in _ends(broken).items() if name not in reached}


def _ends(broken: Sequence[tuple[str, str]]) -> dict[str, str]:
    """What is wrong with the nodes of broken links."""
    found: dict[str, list[str]] = {}
    for a, b in broken:
        found.setdefault(a, []).append(b)
        found.setdefault(b, []).append(a)
    return {name: f"does not reach {', '.join(sorted(others))}" for name, others in found.items()}
