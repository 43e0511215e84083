"""Choose a node for each process of a run, from what the run asks for and what the nodes have. Independent of Ray.

Processes come in kinds (the ranks of one group, the engines). Consecutive processes of a kind form blocks, each of which stays on one node:
a tensor-parallel group, an expert-parallel group, as many data-parallel ranks of an engine as fit. A kind fills whole nodes as far as
possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Node:
    """A machine, and what it has free."""

    name: str
    cpus: int
    gpus: int


@dataclass(frozen=True)
class ProcessKind:
    """Processes that do the same work, numbered from 0.

    Args:
        name: used in messages.
        processes: how many; each takes a CPU.
        gpus: the number of GPUs of each process; 0 if they have none.
        blocks: sizes of a block, the number of consecutive processes that share a node. The first size that some node can hold is used; if
            there is none, the last, which is then refused. Each divides `processes`.
    """

    name: str
    processes: int
    gpus: int = 0
    blocks: tuple[int, ...] = (1,)


class NoRoom(ValueError):
    """The nodes cannot hold what is asked for; the message gives both numbers."""


def place(kinds: Sequence[ProcessKind], nodes: Sequence[Node]) -> list[list[str]]:
    """Return the name of the node of each process, for each kind.

    The kind with the largest blocks chooses first. If all block sizes divide one another, as powers of two do, and CPUs are not what is
    short, this finds a placement whenever there is one.

    Raises NoRoom.
    """
    free = {node.name: node for node in nodes}
    block = [_block(kind, nodes) for kind in kinds]
    places: list[list[str]] = [[] for _ in kinds]
    for index in sorted(range(len(kinds)), key=lambda index: -block[index] * max(1, kinds[index].gpus)):
        kind, together = kinds[index], block[index]
        missing = kind.processes // together
        while missing:
            room = {name: min(_room(node, kind, together), missing) for name, node in free.items()}
            best = max(room, key=lambda name: (room[name], -_left(free[name], kind, together * room[name])), default=None)
            if best is None or not room[best]:
                raise NoRoom(_refusal(kinds, block, nodes))
            count = together * room[best]
            free[best] = replace(free[best], cpus=free[best].cpus - count, gpus=free[best].gpus - count * kind.gpus)
            places[index] += [best] * count
            missing -= room[best]
    return places


def _block(kind: ProcessKind, nodes: Sequence[Node]) -> int:
    return next((size for size in kind.blocks if any(_room(node, kind, size) for node in nodes)), kind.blocks[-1])


def _room(node: Node, kind: ProcessKind, together: int) -> int:
    """The number of blocks that a node can hold."""
    cpus = node.cpus // together
    return min(cpus, node.gpus // (together * kind.gpus)) if kind.gpus else cpus


def _left(node: Node, kind: ProcessKind, processes: int) -> int:
    return node.gpus - processes * kind.gpus if kind.gpus else node.cpus - processes


def _refusal(kinds: Sequence[ProcessKind], block: Sequence[int], nodes: Sequence[Node]) -> str:
    """One line for whatever is short: GPUs in total, GPUs of one node, or CPUs."""
    request = ", ".join(f"{kind.name} {kind.processes // size}x{size * (kind.gpus or 1)}" for kind, size in zip(kinds, block, strict=True))
    gpus, cpus = sum(kind.processes * kind.gpus for kind in kinds), sum(kind.processes for kind in kinds)
    unit, demand, have = ("GPUs", gpus, [node.gpus for node in nodes]) if gpus else ("CPUs", cpus, [node.cpus for node in nodes])
    short = "" if not gpus or sum(node.cpus for node in nodes) >= cpus else f"; and {cpus} CPUs, of {sum(node.cpus for node in nodes)}"
    each = ", ".join(map(str, sorted(have, reverse=True)))
    return f"{demand} {unit} are asked for, in blocks on one node each ({request}); there are {sum(have)} ({each}){short}"
