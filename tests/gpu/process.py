"""A rank in a process of its own, on a device of its own, so that what a GPU gives can be held against the CPU."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

Device = Literal["cpu", "cuda", "pretend"]  # pretend: see `pretend`
Run = Callable[..., Any]
"""(function, *arguments) -> what function(grid, *arguments) returns on a grid of one rank, with tensors on the CPU."""
LIMIT_S = 280.0  # of one call: a part has five minutes


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

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """AssertionError where it raised (the traceback), the process died, or it was not done in `LIMIT_S`."""
        doing = f"{function.__name__} on {self._device}"
        try:
            self._pipe.send((function, arguments))
            assert self._pipe.poll(LIMIT_S), f"{doing}: not done in {LIMIT_S:g} s"
            good, result = _unpacked(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._process.join()
            raise AssertionError(f"{doing}: the process died (exit code {self._process.exitcode})") from None
        assert good, f"{doing}:\n{result}"
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def imported(grid: Any) -> set[str]:
    """The packages that the process has imported so far."""
    return {name.partition(".")[0] for name, module in sys.modules.items() if module is not None}


def _serve(pipe: Any, device: Device, exact: bool) -> None:
    grid = None
    while True:
        try:
            if grid is None:
                grid = _grid(device, exact)
            function, arguments = pipe.recv()  # imports the function's module: after the backend is chosen
            answer = True, function(grid, *arguments)
        except EOFError:
            os._exit(0)  # threads of process groups are not waited for
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(_packed(answer))


def _grid(device: Device, exact: bool) -> Any:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from megarl.parallel import backend

    if device == "pretend":
        from tests.gpu import pretend

        pretend.install()
        backend.Cuda.collective = "gloo"  # type: ignore[assignment]
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
