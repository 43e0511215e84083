"""Parts device, weights, parking and optimizer: how fast bytes move that every step moves."""

from collections.abc import Callable
from typing import Any

import torch

from megarl.parallel.backend import choose
from tests.gpu.process import Run
from tests.gpu.report import Report
from tests.gpu.timing import memory_over, rate, seconds_of, timed

MODEL_BYTES = 61.1e9  # Qwen3-30B-A3B in bfloat16


def device(grid: Any, small: bool) -> dict[str, Any]:
    """The GPU's own: a copy in its memory, one over the bus, and a matrix product."""
    backend = choose()
    size, side = (1 << 16, 64) if small else (2 << 30, 8_192)
    one, other = (torch.empty(size, dtype=torch.uint8, device=backend.device) for _ in range(2))
    host = backend.staging_buffer(torch.Size([size]), torch.uint8)
    x, y = (torch.randn(side, side, device=backend.device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "copy GB/s": 2 * size / timed(lambda: one.copy_(other)).seconds / 1e9,
        "to the host GB/s": size / timed(lambda: host.copy_(one, non_blocking=True)).seconds / 1e9,
        "from the host GB/s": size / timed(lambda: one.copy_(host, non_blocking=True)).seconds / 1e9,
        "product TFLOP/s": 2 * side**3 / timed(lambda: x @ y).seconds / 1e12,
    }


def weights(grid: Any, small: bool) -> dict[str, Any]:
    """A weight update's work on the experts of a layer: fingerprints, fp8 blocks, packing into a bucket; and for the whole of 30B-A3B."""
    from megarl.sync.fingerprint import Fingerprinter
    from megarl.sync.quantize import dequantize, quantize
    from megarl.sync.wire import Bucket, unpack_stacks

    place = choose().device
    stack_EFD = torch.randn(*((4, 64, 64) if small else (128, 768, 2_048)), device=place).mul_(0.02).to(torch.bfloat16)
    names = [f"expert {n}" for n in range(len(stack_EFD))]
    room = torch.empty(stack_EFD.nbytes + 64, dtype=torch.uint8, device=place)

    def fingerprints() -> Any:
        prints = Fingerprinter()
        prints.add(list(names), stack_EFD)
        return prints

    def packed() -> Bucket:
        bucket = Bucket(room)
        bucket.add(list(names), stack_EFD)
        return bucket

    works = {"fingerprints": fingerprints, "fp8": lambda: quantize(stack_EFD), "packing": packed}
    figures: dict[str, Any] = {name: rate(stack_EFD.nbytes, timed(work)) for name, work in works.items()}
    [(_, unpacked)] = unpack_stacks(room, packed().header())
    error = (dequantize(*quantize(stack_EFD)) - stack_EFD.float()).abs().max() / stack_EFD.float().abs().max()
    return {
        **figures,
        "seconds for 30B-A3B": {name: MODEL_BYTES / 1e9 / figures[name]["GB/s"] for name in works},
        "lost in packing": not torch.equal(unpacked, stack_EFD),
        "fp8 error": float(error),
    }


def parking(grid: Any, small: bool) -> dict[str, Any]:
    """Tensors of 8 GB leave the device and come back, three times: the first allocates the host's memory."""
    from megarl.host.parking import Parking

    backend = choose()
    tensors = [torch.randn(1 << 14 if small else 256 << 20, device=backend.device) for _ in range(2 if small else 8)]
    sums = [float(tensor.double().sum()) for tensor in tensors]
    size, parked = sum(tensor.nbytes for tensor in tensors), Parking(backend.parking_buffer)
    rounds = []

    def leave() -> None:
        parked.park(tensors)
        backend.empty_cache()

    for _ in range(3):
        out, back = seconds_of(leave), seconds_of(parked.wake)
        rounds.append({"out GB/s": size / out / 1e9, "back GB/s": size / back / 1e9})
    return {"GB": size / 1e9, "rounds": rounds, "changed": sums != [float(tensor.double().sum()) for tensor in tensors]}


def optimizer(grid: Any, small: bool) -> dict[str, Any]:
    """AdamW in one kernel on 537 million elements: about half of a rank's share of 30B over 32 GPUs. 28 bytes an element are moved."""
    count = 1 << 12 if small else 1 << 29
    weight = torch.nn.Parameter(torch.randn(count, device=choose().device))
    weight.grad = torch.randn_like(weight)
    adam = torch.optim.AdamW([weight], lr=1e-6, fused=True)
    timing = timed(adam.step)
    return {"elements": count, "seconds": timing.seconds, "GB/s": 28 * count / timing.seconds / 1e9, **memory_over(timing)}


def check(there: Run, report: Report, *parts: Callable[[Any, bool], dict[str, Any]], small: bool = False) -> None:
    """Measures these parts on the device."""
    for part in parts:
        with report.section(part.__name__):
            figures = report.figures[part.__name__] = there(part, small)
            report.check(not figures.get("lost in packing"), "a bucket does not hold what went into it")
            report.check(figures.get("fp8 error", 0.0) < 2**-4, f"fp8 blocks: {figures.get('fp8 error')} of the largest weight are lost")
            report.check(not figures.get("changed"), "parked tensors came back changed")
