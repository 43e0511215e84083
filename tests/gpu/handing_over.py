"""Part 4: buckets of a weight update from one process to another on the same device, without a copy on the way: order, contents, leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tests.gpu.process import Run

BUCKETS, MEGABYTES = 1_000, 16
LEAK = 64 << 20  # bytes: less than a bucket in ten that stays


def hand_over(grid: Any, transport: Literal["cuda_ipc", "shm"], buckets: int, megabytes: int) -> dict[str, Any]:
    """Sends one tensor a bucket to another process on this device, each full of its number.

    Returns:
        What that process saw in each bucket, and what both held after the tenth part of the buckets and at the end.
    """
    from megarl.parallel.backend import choose
    from megarl.sync.send import Sender

    device = choose().device
    with tempfile.TemporaryDirectory() as directory:
        listener = Listener(os.path.join(directory, "buckets"), "AF_UNIX")
        command = [sys.executable, "-m", "tests.gpu.handing_over", str(listener.address), str(device)]
        with subprocess.Popen(command) as engine, listener.accept() as pipe:
            sender = Sender(transport, workers=1, host="", bucket_mb=megabytes, timeout_s=60.0, device=device)
            seen: list[Any] = []
            held: list[int] = []

            def announce(message: dict[str, Any]) -> Callable[[], object]:
                pipe.send(message)

                def taken() -> None:
                    seen.append(pipe.recv())
                    held.append(_held(device))

                return taken

            def stream() -> Iterator[tuple[str, Tensor]]:
                for number in range(buckets):
                    yield f"tensor {number}", torch.full((megabytes << 18,), float(number), device=device)

            begun = time.perf_counter()
            sent = sender.send(stream(), announce)
            seconds = time.perf_counter() - begun
            sender.close()
            pipe.send(None)
            assert engine.wait(60) == 0
    return {"seen": seen, "held": held, "buckets": sent.buckets, "GB/s": sent.nbytes / seconds / 1e9}


def _engine(address: str, where: str) -> None:
    """The receiving process: of each bucket its names, the least and the greatest value, and what this process holds."""
    from megarl.sync.receive import BucketReceiver
    from megarl.sync.wire import Header

    device = torch.device(where)
    receiver = BucketReceiver(device)
    with Client(address) as pipe:
        while (message := pipe.recv()) is not None:
            values = {name: tensor.aminmax() for name, tensor in receiver.receive([Header.parse(message)])}
            pipe.send(({name: (float(least), float(most)) for name, (least, most) in values.items()}, _held(device)))


def _held(device: torch.device) -> int:
    """Bytes of a GPU that all its processes hold; on a CPU this process's own."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check(there: Run, transport: Literal["cuda_ipc", "shm"], *, buckets: int = BUCKETS, megabytes: int = MEGABYTES) -> dict[str, Any]:
    """Hands buckets over on the device of `there`. Returns figures; AssertionError where one is lost, late, or stays in memory."""
    found = there(hand_over, transport, buckets, megabytes)
    assert found["buckets"] == buckets
    assert [values for values, _ in found["seen"]] == [{f"tensor {n}": (float(n), float(n))} for n in range(buckets)]
    after, grown = buckets // 10, {}
    for name, held in (("sender", found["held"]), ("engine", [size for _, size in found["seen"]])):
        grown[name] = held[-1] - held[after]
        assert grown[name] < LEAK, f"the {name} holds {grown[name]} bytes more after {buckets} buckets than after {after}"
    return {
        "buckets": buckets,
        "MB a bucket": megabytes,
        "GB/s": found["GB/s"],
        **{f"growth, {name}": size for name, size in grown.items()},
    }


if __name__ == "__main__":
    _engine(*sys.argv[1:])
