"""Test which nodes of an allocation reach each other, and how fast, in short-lived processes."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from megarl.cluster.actor_group import ActorGroup, end
from megarl.cluster.membership import TooFewNodes
from megarl.cluster.on_node import on
from megarl.cluster.server import is_loss
from megarl.text.display import one_line

if TYPE_CHECKING:
    from megarl.parallel.links import LinkTimes

LINKS_S = 120.0  # for the ranks' joint work once their processes are up; plus one second per node
FABRIC_GB_S = 20.0  # per node: InfiniBand exceeds it, TCP does not
SHOWN = 200  # characters of the error of a failed test

Link = tuple[str, str]  # two nodes


def reach(
    names: Sequence[str], nodes: Mapping[str, str], needed: int, per_node: int, gpus: bool, timeout_s: float
) -> tuple[list[LinkTimes], dict[str, str]]:
    """Time the links between nodes.

    Args:
        names: the names of the nodes, the head first.
        nodes: Ray's ids by name.
        needed: how many nodes, the head among them, must reach each other.
        per_node: the number of ranks per node.
        gpus: whether each rank has a GPU.
        timeout_s: for the start of the ranks.

    Returns:
        The times of all ranks of the nodes that reach each other, and what is wrong with each of the other nodes.

    Raises:
        TooFewNodes: fewer nodes than the run needs work on their own and reach each other, or the head does not; names those that do not.
        ProcessStalled: the session is lost, of which no node is to blame.
    """
    try:
        return _measured([nodes[name] for name in names], per_node, gpus, timeout_s), {}
    except Exception as error:  # each backend reports a hanging link as a different error
        if is_loss(error):
            raise
        reason = one_line(f"{type(error).__name__}: {error}", SHOWN)
        bad = _failing_alone(names, nodes, per_node, gpus, timeout_s)
        if not bad:
            broken = _broken(names, nodes, gpus, timeout_s)
            if not broken:
                raise
            bad = to_blame(names, broken, partial(_unreached, nodes=nodes, gpus=gpus, timeout_s=timeout_s))
        good = [name for name in names if name not in bad]
        if names[0] in bad or len(good) < needed:
            raise TooFewNodes(f"not all nodes reach each other ({reason})", bad) from error
    return _measured([nodes[name] for name in good], per_node, gpus, timeout_s), bad


def answers(nodes: Mapping[str, str], ask: Callable[..., Any], *arguments: Any, within_s: float) -> dict[str, Any]:
    """Call a function on all nodes at the same time, and return its results by name; a node without one gets a string that says why.

    Args:
        nodes: Ray's ids by name.
        ask: the function.
        *arguments: the function's arguments.
        within_s: for all results.
    """
    task: Any = ray.remote(ask)
    references = {name: task.options(**on(node), max_retries=0).remote(*arguments) for name, node in nodes.items()}
    deadline, results = time.monotonic() + within_s, dict[str, Any]()
    for name, reference in references.items():
        try:
            results[name] = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
        except RayTaskError as error:
            results[name] = f"cannot be tested: {one_line(str(error.cause), SHOWN)}"
        except RayError as error:
            results[name] = f"does not answer within {within_s:g} s ({type(error).__name__})"
    return results


class Linked:
    """One rank of the timing test, in a process of its own."""

    def __init__(self, rank: int, world: int, per_node: int, gpus: bool, timeout_s: float) -> None:
        self._given = rank, world, per_node
        self._gpus, self._timeout_s = gpus, timeout_s
        self._store: Any = None

    def prepare(self) -> None:
        """Import torch, which takes a long time from a slow disk."""
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


def _measured(nodes: Sequence[str], per_node: int, gpus: bool, timeout_s: float) -> list[LinkTimes]:
    """Measure the times of all ranks. Raises what one of them fails with, or WorkerLate if a link hangs."""
    world = len(nodes) * per_node
    actor: Any = ray.remote(Linked)
    limit_s = min(timeout_s, LINKS_S + len(nodes))
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


def compared(times: Sequence[LinkTimes], nodes: int, factor: float) -> tuple[list[int], str]:
    """Return the indices of the slow nodes, and the times in words.

    Args:
        times: the times of all ranks.
        nodes: how many nodes the ranks are on.
        factor: how many times as long as the median node a slow node takes.
    """
    from megarl.parallel.links import slow

    per_node = len(times) // nodes
    best = [max(one.best_edge for one in times[n * per_node : (n + 1) * per_node]) for n in range(nodes)]
    reduce, to_all = max(one.all_reduce for one in times), max(one.all_to_all for one in times)
    edge = f", neighbours {1e3 * max(best):.1f} ms" if nodes > 1 else ""
    words = f"; {times[0].megabytes} MB over {len(times)} ranks: all-reduce {1e3 * reduce:.1f} ms, all-to-all {1e3 * to_all:.1f} ms{edge}"
    return slow(best, factor), words


def without_fabric(times: Sequence[LinkTimes], nodes: int, fabric: Path = Path("/sys/class/infiniband")) -> str | None:
    """Return a warning if there is InfiniBand, but GPUs of several nodes communicate no faster than over TCP; else None.

    Args:
        times: the times of all ranks.
        nodes: how many nodes the ranks are on.
        fabric: the directory in which the kernel lists InfiniBand devices.
    """
    per_node = len(times) // nodes
    rates = [one.megabytes / 1e3 / one.best_edge if nodes > 1 else 0.0 for one in times]
    best = max(sum(rates[n * per_node : (n + 1) * per_node]) for n in range(nodes))
    if nodes == 1 or best >= FABRIC_GB_S or not fabric.is_dir() or not any(fabric.iterdir()):
        return None
    advice = "NCCL_DEBUG=INFO says what NCCL uses"
    return f"no node sends more than {best:.1f} GB/s to the next one, as over TCP, though {fabric} lists devices: {advice}"


def _failing_alone(names: Sequence[str], nodes: Mapping[str, str], per_node: int, gpus: bool, timeout_s: float) -> dict[str, str]:
    """The nodes whose ranks fail even on their own, and why: one bad GPU is enough. Empty if all nodes fail: then none is to blame."""
    faults = _faults([(name,) for name in names], nodes, per_node, gpus, timeout_s) if len(names) > 1 else {}
    return {name: f"fails alone: {why}" for (name,), why in faults.items()} if len(faults) < len(names) else {}


def _broken(names: Sequence[str], nodes: Mapping[str, str], gpus: bool, timeout_s: float) -> list[Link]:
    """The neighbours that do not reach each other, after a test of all nodes together has failed."""
    from megarl.parallel.links import edges

    rounds = [[(names[a], names[b]) for a, b in pairs] for pairs in edges(len(names))]
    return [link for links in rounds for link in _unreached(links, nodes, gpus, timeout_s)]


def _unreached(links: Sequence[Link], nodes: Mapping[str, str], gpus: bool, timeout_s: float) -> list[Link]:
    """Those of the links that do not work."""
    faults = _faults(links, nodes, 1, gpus, timeout_s)
    return [link for link in links if link in faults]


def _faults(
    groups: Sequence[tuple[str, ...]], nodes: Mapping[str, str], per_node: int, gpus: bool, timeout_s: float
) -> dict[tuple[str, ...], str]:
    """What the test of each failing group fails with. All groups are tested at the same time, so no node may be in two."""

    def fault(group: tuple[str, ...]) -> str | None:
        try:
            _measured([nodes[name] for name in group], per_node, gpus, timeout_s)
        except Exception as error:
            if is_loss(error):
                raise
            return one_line(f"{type(error).__name__}: {error}", SHOWN)
        return None

    with ThreadPoolExecutor(len(groups)) as threads:
        return {group: why for group, why in zip(groups, threads.map(fault, groups), strict=True) if why is not None}


def to_blame(names: Sequence[str], broken: Sequence[Link], unreached: Callable[[Sequence[Link]], list[Link]]) -> dict[str, str]:
    """Find the nodes without which all others reach each other, as far as tests of pairs can show, and the nodes that they do not reach.

    A node that reaches neither of its neighbours is one. If two neighbours fail only to reach each other, each is tested with the other's
    next neighbour: the one that reaches fewer nodes is to blame, and in a tie the later one.

    Args:
        names: the names of the nodes, numbered as in `links.edges`.
        broken: the neighbours that do not reach each other.
        unreached: tests links between pairs of nodes, and returns those that do not work.
    """
    from megarl.parallel.links import edges

    reached = {names[n] for pairs in edges(len(names)) for edge in pairs if (names[edge[0]], names[edge[1]]) not in broken for n in edge}
    bad, broken_links = [name for name in names if name not in reached], list(broken)
    for a, b in broken:
        if a in bad or b in bad:
            continue
        if len(names) > 3:
            broken_links += unreached([(names[names.index(a) - 1], b), (a, names[(names.index(b) + 1) % len(names)])])
        counting = [link for link in broken_links if not {*link} & {*bad}]
        bad.append(max(a, b, key=lambda name: (sum(name in link for link in counting), names.index(name))))
    others = {name: sorted({*chain(*(link for link in broken_links if name in link))} - {name}) for name in bad}
    return {name: f"does not reach {', '.join(unreached_by)}" for name, unreached_by in others.items()}
