"""Seconds and memory of work on this process's device."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megarl.parallel.backend import choose

ROUNDS, WARM_UP = 5, 2


@dataclass(frozen=True)
class Timing:
    """The median of the rounds."""

    seconds: float
    peak: int | None  # bytes of the GPU's memory beyond what was held before; None on a CPU


def timed(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> Timing:
    """Time `work` in several rounds after a warm-up; `before` runs before each of them, untimed."""
    backend = choose()
    seconds, peak = [], None
    for _ in range(WARM_UP + ROUNDS):
        before()
        backend.synchronize()
        base = allocated()
        begun = time.perf_counter()
        work()
        backend.synchronize()
        seconds.append(time.perf_counter() - begun)
        peak = None if base is None else torch.cuda.max_memory_allocated() - base
    return Timing(statistics.median(seconds[WARM_UP:]), peak)


def seconds_of(work: Callable[[], object]) -> float:
    """The seconds of `work` where its first time matters, or differs from the others."""
    choose().synchronize()
    begun = time.perf_counter()
    work()
    choose().synchronize()
    return time.perf_counter() - begun


def allocated() -> int | None:
    """The bytes of the GPU's memory that tensors hold, from which a new peak begins; None on a CPU."""
    if choose().device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def rate(size: float, timing: Timing) -> dict[str, float]:
    """`size` in bytes: GB per second, and the memory on top."""
    return {"GB/s": size / timing.seconds / 1e9, **memory_over(timing)}


def memory_over(timing: Timing) -> dict[str, float]:
    """The memory on top, in GB, where there is a GPU to hold it."""
    return {} if timing.peak is None else {"GB over": timing.peak / 1e9}
