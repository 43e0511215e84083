"""A pool of ranks on this machine, started once for the whole test session: real processes, gloo, loopback.

One template process imports Megatron once and forks the ranks, so that starting four of them costs one import.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import PrefixStore, Store

from megarl.config import Layout
from megarl.parallel.grid import connect_store, destroy_grid, init_grid, listen_store

RANKS = 4
START_S = 120.0  # for the template's imports on a busy machine
PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h
COLLECTIVE_S = 60.0  # longest wait of one collective


class RankError(AssertionError):
    """A rank raised: its traceback."""


@dataclass(frozen=True)
class _Task:
    function: Callable[..., Any]
    layout: Layout
    arguments: tuple[Any, ...]
    number: int  # of the task; keeps the keys of one grid apart from the next one's


class Pool:
    """`RANKS` waiting processes, started by the first task and anew after a rank died or hung. Make it once a session (fixture `pool`)."""

    def __init__(self) -> None:
        self._pipes: list[Connection] = []
        self._template: Any = None
        self._tasks = 0
        self._broken = False  # a rank died

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, timeout_s: float = 180.0) -> list[Any]:
        """function(grid, *arguments) on each of `layout.ranks` ranks of a fresh grid; their results in rank order.

        Raises RankError with the tracebacks, the first failure first, or TimeoutError naming the ranks that are late.
        """
        if self._broken:
            self.close()
        if self._template is None:
            self._start()
        self._tasks += 1
        for pipe in self._pipes[: layout.ranks]:
            pipe.send(_Task(function, layout, arguments, self._tasks))
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        errors: list[str] = []
        waiting = list(range(layout.ranks))
        while waiting:
            ready = wait([self._pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {waiting} did not finish {function.__name__} in {timeout_s:g} s")
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                waiting.remove(rank)
                ok, results[rank] = self._answer(rank)
                if not ok:
                    errors.append(f"rank {rank}:\n{results[rank]}")
        if errors:
            raise RankError("\n".join(errors))
        return [results[rank] for rank in range(layout.ranks)]

    def close(self) -> None:
        """Ends the ranks, whatever they are doing."""
        if self._template is not None:
            self._template.kill()  # its ranks die with it
            self._template.join()
        for pipe in self._pipes:
            pipe.close()
        self._template, self._pipes, self._broken = None, [], False

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(RANKS)]
        self._pipes = [ours for ours, _ in pairs]
        self._template = context.Process(target=_template, args=([theirs for _, theirs in pairs],))
        self._template.start()
        for _, theirs in pairs:
            theirs.close()
        if not self._pipes[0].poll(START_S):
            self.close()
            raise TimeoutError(f"the pool of ranks did not start in {START_S:g} s")
        port = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def _answer(self, rank: int) -> tuple[bool, Any]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._broken = True
            return False, "the process died"


def _die_with_parent() -> None:
    """The kernel kills this process when the one that made it ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _template(pipes: list[Connection]) -> None:
    _die_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from megarl.parallel.backend import choose

    torch.set_num_threads(1)
    choose()
    import megarl.models.build
    import megarl.parallel.optimizer
    import megarl.parallel.schedule  # noqa: F401

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, pipes)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for pipe in pipes:
        pipe.close()
    for process in ranks:
        process.join()


def _rank(rank: int, pipes: list[Connection]) -> None:
    _die_with_parent()
    for other, pipe in enumerate(pipes):
        if other != rank:
            pipe.close()
    pipe = pipes[rank]
    if rank == 0:
        store, port = listen_store("127.0.0.1", RANKS, COLLECTIVE_S)
        pipe.send(port)
    else:
        store = connect_store("127.0.0.1", pipe.recv(), RANKS, COLLECTIVE_S)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return  # the session is over
        pipe.send(_perform(task, rank, store))


def _perform(task: _Task, rank: int, store: Store) -> tuple[bool, Any]:
    try:
        grid = init_grid(task.layout, rank=rank, store=PrefixStore(str(task.number), store), seed=1, timeout_s=COLLECTIVE_S)
        try:
            return True, task.function(grid, *task.arguments)
        finally:
            destroy_grid()
    except BaseException:
        return False, traceback.format_exc()
