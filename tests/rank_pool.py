"""Ranks on this machine for the distributed tests: real processes, gloo, loopback.

One template process imports Megatron once a session and forks fresh ranks for every task: a fork costs tens of milliseconds, and a rank
that ends leaves no threads, process groups or models to the next. Where there are GPUs the ranks are spawned, each on one of them: CUDA
does not live through a fork.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from megarl.config import Layout
from megarl.imports import gc_paused
from megarl.parallel.grid import destroy_grid, init_grid
from megarl.sync.store import connect_store, listen_store

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Start = Literal["fork", "spawn"]

START_S = 300.0  # for the template's imports
TASK_S = 600.0  # these limits end what hangs; they are no measure of speed
COLLECTIVE_S = 120.0  # longest wait of one collective
THREADS = 150  # most threads of a rank: a grid has up to 20, and more over NCCL
PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h


class RankError(AssertionError):
    """A rank raised: its traceback."""


@dataclass(frozen=True)
class _Task:
    name: str
    layout: Layout
    work: bytes  # the pickled function and its arguments


class Pool:
    """Runs functions on fresh ranks. Make it once a session (fixture `pool`); the template starts with the first task."""

    def __init__(self, start: Start) -> None:
        self._way = start
        self._pipe: Connection | None = None
        self._template: Any = None

    def run(self, function: Callable[..., Any], layout: Layout, *arguments: Any, timeout_s: float = TASK_S) -> list[Any]:
        """function(grid, *arguments) on each of `layout.ranks` ranks of a fresh grid; their results in rank order.

        Raises RankError with the tracebacks, the first failure first, or TimeoutError naming the ranks that are late.
        """
        pipe = self._start() if self._pipe is None else self._pipe
        try:
            return self._answers(pipe, _Task(function.__name__, layout, pickle.dumps((function, arguments))), timeout_s)
        except (EOFError, ConnectionError):
            self._template.join()
            died = f"the template of the ranks died (exit code {self._template.exitcode})"
            self.close()  # the next task has a new one
            raise RankError(died) from None

    def _answers(self, pipe: Connection, task: _Task, timeout_s: float) -> list[Any]:
        """The task's results in rank order."""
        layout = task.layout
        pipe.send_bytes(pickle.dumps(task))
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        errors: list[str] = []
        while len(results) < layout.ranks:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                late = sorted(set(range(layout.ranks)) - results.keys())
                self.close()
                raise TimeoutError(f"ranks {late} did not finish {task.name} in {timeout_s:g} s")
            rank, (ok, results[rank]) = pickle.loads(pipe.recv_bytes())
            if not ok:
                errors.append(f"rank {rank}:\n{results[rank]}")
        if errors:
            raise RankError("\n".join(errors))
        return [results[rank] for rank in range(layout.ranks)]

    def close(self) -> None:
        """Ends the template and its ranks, whatever they are doing."""
        if self._template is not None:
            self._template.kill()  # its ranks die with it
            self._template.join()
        if self._pipe is not None:
            self._pipe.close()
        self._template = self._pipe = None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._template = context.Process(target=_serve, args=(theirs, self._way))
        self._template.start()
        theirs.close()
        if not self._pipe.poll(START_S):
            self.close()
            raise TimeoutError(f"the template of the ranks did not start in {START_S:g} s")
        assert self._pipe.recv_bytes() == b"ready"
        return self._pipe


def _die_with_parent() -> None:
    """The kernel kills this process when the one that made it ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(session: Connection, start: Start) -> None:
    """The template: answers each task of the session with (rank, (ok, result or traceback)) of every rank, in the order they end."""
    _die_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    if start == "fork":
        _import_all()
    session.send_bytes(b"ready")
    while True:
        try:
            task: _Task = pickle.loads(session.recv_bytes())
        except EOFError:
            return  # the session is over
        if start == "fork":
            with gc_paused():
                pickle.loads(task.work)  # imports the test's module here, once for all its tasks
        _start_ranks(task, session, start)


def _import_all() -> None:
    with gc_paused():
        import numpy.random  # noqa: F401  # numpy puts it off until it is used, which every rank would pay for
        import torch

        from megarl.parallel.backend import choose

        torch.set_num_threads(1)
        choose()
        # What each rank would import: Megatron's optimizer asks for this model, torch's for the compiler.
        import megatron.core.models.mimo  # noqa: F401
        import torch._dynamo

        import megarl.parallel.logprobs_chunked
        import megarl.parallel.optimizer
        import megarl.parallel.schedule
        import megarl.ranks.model  # noqa: F401


def _start_ranks(task: _Task, session: Connection, start: Start) -> None:
    """Runs one task on ranks of its own and passes their answers on."""
    context: Any = multiprocessing.get_context(start)
    ports = context.SimpleQueue()
    pipes: list[Connection] = []
    processes = []
    for rank in range(task.layout.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(task, rank, ports, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answer = pipe.recv_bytes()
            except (EOFError, ConnectionResetError):
                processes[rank].join()
                answer = pickle.dumps((rank, (False, f"the process died (exit code {processes[rank].exitcode})")))
            session.send_bytes(answer)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.close()
        process.kill()  # the others may have needed rank 0's store until now
        process.join()


def _rank(task: _Task, rank: int, ports: Any, template: Connection) -> NoReturn:
    _die_with_parent()
    faulthandler.enable()
    os.environ["LOCAL_RANK"] = str(rank)  # of the GPUs, its own
    try:
        store = _store(task.layout.ranks, rank, ports)  # here, where it outlives the task: rank 0's serves ranks that are not done yet
        template.send_bytes(pickle.dumps((rank, _perform(task, rank, store))))
    except BaseException:  # of a result that cannot be sent
        template.send_bytes(pickle.dumps((rank, (False, traceback.format_exc()))))
    sys.stdout.flush()
    sys.stderr.flush()
    while True:
        signal.pause()  # the template ends all ranks of a task together


def _store(ranks: int, rank: int, ports: Any) -> TCPStore:
    if rank != 0:
        return connect_store("127.0.0.1", ports.get(), ranks, COLLECTIVE_S)
    store, port = listen_store("127.0.0.1", ranks, COLLECTIVE_S)
    for _ in range(ranks - 1):
        ports.put(port)
    return store


def _perform(task: _Task, rank: int, store: TCPStore) -> tuple[bool, Any]:
    """(True, the function's result) or (False, the traceback)."""
    try:
        function, arguments = pickle.loads(task.work)
        grid = init_grid(task.layout, rank=rank, store=store, seed=1, timeout_s=COLLECTIVE_S)
        try:
            result = function(grid, *arguments)
        except BaseException:
            destroy_grid()  # the others need not wait for this rank; of one that is done they may still read
            raise
        threads = len(os.listdir("/proc/self/task"))
        assert threads < THREADS, f"{task.name} left {threads} threads in a rank"
        return True, result
    except BaseException:
        return False, traceback.format_exc()
