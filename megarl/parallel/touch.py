"""A kernel for Triton to compile, as ranks and engines have. Only `backend.touch_gpus` imports this: the CPU stack has no Triton."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from megarl.parallel.toolchain import fault

COUNT = 64  # numbers that it writes


@triton.jit
def _count(numbers, size: tl.constexpr):  # type: ignore[no-untyped-def]  # a kernel may name nothing but Triton's, not even in annotations
    tl.store(numbers + tl.arange(0, size), tl.arange(0, size))


def touch(device: str) -> str | None:
    """Compile the kernel, or take it from Triton's cache, and run it on the current device.

    Args:
        device: the current device.

    Returns:
        What is wrong; None if nothing is. Whatever the GPU itself is to blame for is raised.
    """
    numbers, stderr, log = torch.zeros(COUNT, dtype=torch.int32, device=device), os.dup(2), os.memfd_create("stderr")
    os.dup2(log, 2)  # the compiler says there what it lacks
    try:
        _count[(1,)](numbers, COUNT)
        values = numbers.tolist()
    except Exception as error:
        output = os.pread(log, 1 << 16, 0).decode(errors="replace")
        if (why := fault(error, output)) is None:
            raise
        return why
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(log)
    return None if values == list(range(COUNT)) else "a Triton kernel writes wrong numbers"
