"""Part handing_over: buckets of a weight update go to another process on the same device, without a copy: order, contents, leaks."""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tests.gpu.process import Run
from tests.gpu.report import Report

BUCKETS, MEGABYTES = 1_000, 16
LEAK = 64 << 20  # bytes: less than a bucket in ten that stays
ANSWER_S = 60.0  # for the other process to start, and to take a bucket


def hand_over(grid: Any, transport: Literal["cuda_ipc", "shm"], buckets: int, megabytes: int) -> dict[str, Any]:
    """Sends one tensor a bucket to another process on this device, each full of its number.

    Returns:
        What that process saw in each bucket, and what both held after the tenth part of the buckets and at the end.
    """
    from megarl.parallel.backend import choose
    from megarl.sync.send import Sender

    device = choose().device
    pipe, theirs = Pipe()
    command = [sys.executable, "-m", "tests.gpu.handing_over", str(theirs.fileno()), str(device)]
    engine = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()  # what is read here then ends with the engine
    try:
        sender = Sender(transport, workers=1, host="", bucket_mb=megabytes, timeout_s=ANSWER_S, device=device)
        seen: list[Any] = []
        held: list[int] = []

        def announce(message: dict[str, Any]) -> Callable[[], object]:
            pipe.send(message)

            def taken() -> None:
                seen.append(_answer(pipe, f"bucket {len(seen)}"))
                held.append(_held(device))

            return taken

        def stream() -> Iterator[tuple[str, Tensor]]:
            for number in range(buckets):
                yield f"tensor {number}", torch.full((megabytes << 18,), float(number), device=device)

        _answer(pipe, "its start")
        begun = time.perf_counter()
        sent = sender.send(stream(), announce)
        seconds = time.perf_counter() - begun
        sender.close()
        pipe.send(None)
        assert engine.wait(ANSWER_S) == 0
    finally:
        engine.kill()
        engine.wait()
        pipe.close()
    return {"seen": seen, "held": held, "buckets": sent.buckets, "GB/s": sent.nbytes / seconds / 1e9}


def _engine(handle: str, where: str) -> None:
    """The receiving process: of each bucket its names, the least and the greatest value, and what this process holds."""
    from megarl.sync.receive import BucketReceiver
    from megarl.sync.wire import Header

    with Connection(int(handle)) as pipe:
        try:
            device = torch.device(where)
            receiver, _ = BucketReceiver(device), torch.zeros(1, device=device)
            pipe.send("ready")
            while (message := pipe.recv()) is not None:
                values = {name: tensor.aminmax() for name, tensor in receiver.receive([Header.parse(message)])}
                pipe.send(({name: (float(least), float(most)) for name, (least, most) in values.items()}, _held(device)))
        except Exception as error:
            pipe.send(RuntimeError(f"the engine: {traceback.format_exc()}"))
            raise SystemExit(1) from error


def _answer(pipe: Connection, what: str) -> Any:
    """What the engine sends next. Raises its error, or AssertionError where it is late or has ended."""
    assert pipe.poll(ANSWER_S), f"the engine has not answered to {what} within {ANSWER_S:g} s"
    try:
        answer = pipe.recv()
    except EOFError:
        raise AssertionError(f"the engine has ended without an answer to {what}") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _held(device: torch.device) -> int:
    """Bytes of a GPU that all its processes hold; on a CPU this process's own."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check(there: Run, report: Report, transport: Literal["cuda_ipc", "shm"], *, buckets: int = BUCKETS, megabytes: int = MEGABYTES) -> None:
    """Hands buckets over on the device of `there`: none may be lost, late, or stay in memory."""
    seen = there(hand_over, transport, buckets, megabytes)
    report.figures |= {"buckets": seen["buckets"], "MB a bucket": megabytes, "GB/s": seen["GB/s"]}
    values = [{f"tensor {n}": (float(n), float(n))} for n in range(buckets)]
    report.check([values for values, _ in seen["seen"]] == values, "a bucket is lost, late, or not what was sent")
    after = buckets // 10
    for name, held in (("sender", seen["held"]), ("engine", [size for _, size in seen["seen"]])):
        growth = report.figures[f"growth, {name}"] = held[-1] - held[after]
        report.check(growth < LEAK, f"the {name} holds {growth} bytes more after {buckets} buckets than after {after}")


if __name__ == "__main__":
    _engine(*sys.argv[1:])
