"""A rank of its own, on a device of its own: processes of one rank, so that what a GPU gives can be held against the CPU."""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any, Literal

Device = Literal["cpu", "cuda", "pretend"]  # pretend: see `pretend`
LIMIT_S = 280.0  # of one process: a part has five minutes


def on(device: Device, function: Callable[..., Any], *arguments: Any, exact: bool = True) -> Any:
    """function(grid, *arguments) in a new process, on a grid of one rank; its result, with tensors on the CPU.

    Args:
        device: of that process.
        function: of a module.
        *arguments: that can be pickled.
        exact: float32 is float32 (see `backend.choose`).

    Raises:
        AssertionError: it raised (its traceback), died, or was not done in `LIMIT_S`.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, device, exact, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), f"{function.__name__} on {device}: not done in {LIMIT_S:g} s"
        good, result = _unpacked(ours.recv_bytes())
    except EOFError:
        process.join()
        raise AssertionError(f"{function.__name__} on {device}: the process died (exit code {process.exitcode})") from None
    finally:
        process.kill()
        process.join()
    assert good, f"{function.__name__} on {device}:\n{result}"
    return result


def _serve(pipe: Any, device: Device, exact: bool, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = True, _call(device, exact, function, arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(_packed(answer))
    pipe.close()
    os._exit(0)  # threads of process groups are not waited for


def _call(device: Device, exact: bool, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from megarl.parallel import backend

    if device == "pretend":
        from tests.gpu import pretend

        pretend.install()
        backend.Cuda.collective = "gloo"  # type: ignore[assignment]
    backend.choose(device != "cpu", exact=exact)
    from megarl.config import Layout
    from megarl.parallel.grid import init_grid, listen_store

    store, _ = listen_store("127.0.0.1", 1, LIMIT_S)
    return function(init_grid(Layout(), rank=0, store=store, seed=1, timeout_s=LIMIT_S), *arguments)


def _packed(answer: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(answer, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
