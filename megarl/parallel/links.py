"""Measures how fast the processes of a run communicate: gloo on CPUs, NCCL on GPUs."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from megarl.host.network import choose_nccl_interface, interface_towards

REPEATS = 3
MEGABYTES = {"gloo": 4, "nccl": 256}


@dataclass(frozen=True)
class LinkTimes:
    """Times of one rank in seconds, each the shortest of `REPEATS`."""

    megabytes: int
    all_reduce: float
    all_to_all: float
    best_edge: float  # between this rank's node and the faster of its two neighbours; 0 on a single node


def edges(nodes: int) -> list[list[tuple[int, int]]]:
    """The edges of the ring of nodes, in rounds in which no node occurs twice."""
    ring = [(n, (n + 1) % nodes) for n in range(nodes if nodes > 2 else nodes - 1)]
    odd = nodes % 2 and nodes > 2
    rounds = [[edge for n, edge in enumerate(ring) if n % 2 == parity and not (odd and n == nodes - 1)] for parity in (0, 1)]
    return [pairs for pairs in [*rounds, ring[-1:] if odd else []] if pairs]


def slow(best_edge: Sequence[float], factor: float) -> list[int]:
    """The nodes whose faster edge takes more than `factor` times the median node's. Never one of two nodes: they share an edge."""
    ordered = sorted(best_edge)
    return [n for n, seconds in enumerate(best_edge) if len(best_edge) > 2 and seconds > factor * ordered[(len(ordered) - 1) // 2]]


def measure(rank: int, world: int, per_node: int, store: dist.Store, host: str, gpus: bool, timeout_s: float) -> LinkTimes:
    """Time collectives over all ranks, and messages between neighbouring nodes. Collective.

    Args:
        rank: this process's rank, from 0; the ranks of a node are consecutive.
        world: number of ranks.
        per_node: number of ranks on each node.
        store: where the ranks meet.
        host: address of the store; sockets listen on the interface towards it.
        gpus: use NCCL on this process's only GPU instead of gloo.
        timeout_s: time limit of every wait.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interface = interface_towards(host)
    choose_nccl_interface(interface)
    backend, device = ("nccl", torch.device("cuda", 0)) if gpus else ("gloo", torch.device("cpu"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    try:
        count = (MEGABYTES[backend] << 18) // world * world  # float32
        sent, received = torch.ones(count, device=device), torch.empty(count, device=device)

        def seconds(act: Callable[[], object]) -> float:
            act()  # establishes the connections
            taken = []
            for _ in range(REPEATS):
                dist.barrier()
                begun = time.monotonic()
                act()
                sent[0].item()  # waits for the GPU
                taken.append(time.monotonic() - begun)
            return min(taken)

        def exchange(other: int | None) -> None:
            if other is None:
                return
            for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]):
                request.wait()

        reduce = seconds(lambda: dist.all_reduce(sent))
        to_all = seconds(lambda: dist.all_to_all_single(received, sent))
        node, seconds_of_edges = rank // per_node, list[float]()
        for pairs in edges(world // per_node):
            other = next((b if a == node else a for a, b in pairs if node in (a, b)), None)
            taken = seconds(partial(exchange, None if other is None else other * per_node + rank % per_node))
            seconds_of_edges += [] if other is None else [taken]
        return LinkTimes(MEGABYTES[backend], reduce, to_all, min(seconds_of_edges, default=0.0))
    finally:
        dist.destroy_process_group()
