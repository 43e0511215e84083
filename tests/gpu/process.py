"""Ranks in processes of their own, each on a device of its own, so that what a GPU gives can be held against the CPU."""

import gc
import importlib.util
import io
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

Device = Literal["cpu", "cuda", "pretend"]  # pretend: see `pretend`
Run = Callable[..., Any]
"""(function, *arguments) -> what function(grid, *arguments) returns on a grid of one rank, with tensors on the CPU."""
LIMIT_S, END_S = 280.0, 10.0  # of one call; for a process to end


class Rank:
    """A process with a grid of one rank, which is called as a `Run`. Close it.

    Args:
        device: of the process.
        exact: float32 is float32 (see `backend.choose`).
    """

    def __init__(self, device: Device, *, exact: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._device = device
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, device, exact))
        self._process.start()
        theirs.close()

    def __call__(self, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> Any:
        """AssertionError where it raised (the traceback), the process died, or it was not done in `limit_s`, which ends the process."""
        doing = f"{function.__name__} on {self._device}"
        try:
            self._pipe.send((function, arguments))
            if not self._pipe.poll(limit_s):
                self.close()
                raise AssertionError(f"{doing}: not done in {limit_s:.0f} s")
            good, result = _unpacked(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._process.join(END_S)
            raise AssertionError(f"{doing}: the process died (exit code {self._process.exitcode})") from None
        assert good, f"{doing}:\n{result}"
        return result

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return self._process.is_alive()

    def close(self) -> None:
        self._process.kill()
        self._process.join(END_S)  # one that is stuck in the GPU's driver may not end


class Ranks:
    """The ranks that the parts share: importing torch and Megatron anew for each part would take most of the time. Close them.

    Args:
        gpu: the device of those that run on a GPU.
    """

    def __init__(self, gpu: Literal["cuda", "pretend"]) -> None:
        self._gpu: Device = gpu
        self._ranks: dict[tuple[Device, bool], Rank] = {}
        self.deadline = time.monotonic() + LIMIT_S  # of the part that runs

    def gpu(self, *, exact: bool = False) -> Run:
        """A rank on the GPU."""
        return self._run(self._gpu, exact)

    def cpu(self) -> Run:
        """A rank on the CPU."""
        return self._run("cpu", True)

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.close()

    def _run(self, device: Device, exact: bool) -> Run:
        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            key = device, exact
            if key not in self._ranks or not self._ranks[key].alive:
                self._ranks[key] = Rank(device, exact=exact)
            return self._ranks[key](function, *arguments, limit_s=max(1.0, self.deadline - time.monotonic()))

        return run


def imported(grid: Any) -> set[str]:
    """The packages that the process has imported so far."""
    return {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}


def _serve(pipe: Any, device: Device, exact: bool) -> None:
    """Answer one call after the other. If the grid cannot be made, the first is answered with the reason, and the process ends."""
    grid, fault = None, ""
    try:
        grid = _grid(device, exact)
    except BaseException:
        fault = traceback.format_exc()
    while True:
        try:
            function, arguments = pipe.recv()  # imports the function's module: after the backend is chosen
        except EOFError:
            os._exit(0)  # threads of process groups are not waited for
        except BaseException:
            fault = fault or traceback.format_exc()
        if fault:
            pipe.send_bytes(_packed((False, fault)))
            os._exit(1)
        try:
            answer = True, function(grid, *arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        _release()
        pipe.send_bytes(_packed(answer))


def _release() -> None:
    """Give the memory of what has run to what runs next, in this process or another."""
    from megarl.parallel.backend import choose

    gc.collect()
    choose().empty_cache()


def _grid(device: Device, exact: bool) -> Any:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from megarl.parallel import backend

    if device == "pretend":
        from tests.gpu import pretend, triton_here

        # In Triton's interpreter where this Python has Triton, and before the simulation, which may import it.
        kernels = triton_here.fused_kernels() if importlib.util.find_spec("triton") else backend.Cpu.logprob_kernels
        pretend.install()
        backend.Cuda.collective = "gloo"  # type: ignore[assignment]
        backend.Cuda.logprob_kernels = kernels  # type: ignore[method-assign, assignment]
    backend.choose(device != "cpu", exact=exact)
    from megarl.config import Layout
    from megarl.parallel.grid import init_grid
    from megarl.sync.store import listen_store

    store, _ = listen_store("127.0.0.1", 1, LIMIT_S)
    return init_grid(Layout(), rank=0, store=store, seed=1, timeout_s=LIMIT_S)


def _packed(answer: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(answer, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
