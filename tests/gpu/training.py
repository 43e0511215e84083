"""Part 2: a grid of one rank over NCCL, a tiny MoE forward, three optimizer steps; against the same in float32 on the CPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from tests.gpu.process import Device, on

# Set before any GPU ran. Float32: other kernels and orders of summation through three steps of Adam. Bfloat16: 8 bits of mantissa.
FLOAT32, BFLOAT16 = 2e-4, 0.1


def train(grid: Any, path: Path, dtype: Literal["float32", "bfloat16"], recompute: Literal["none", "full"]) -> dict[str, Any]:
    """Three steps of the tiny model, which is made where it is not there yet: what they gave, and what the backend notes of its layers."""
    from megarl.parallel.backend import choose
    from tests.distributed.tiny_training import Job, make_checkpoint, train

    if not path.exists():
        make_checkpoint(path)
    return {**asdict(train(grid, Job(path, steps=3, dtype=dtype, recompute=recompute))), "layers": choose().note}


def check(device: Device, directory: Path) -> dict[str, Any]:
    """Trains on the CPU and on the device. Returns figures; AssertionError where they are apart."""
    path = directory / "tiny"
    cpu = on("cpu", train, path, "float32", "none")
    assert len(cpu["logp"]) > 100
    figures: dict[str, Any] = {}
    runs = [("float32", "none", FLOAT32)]
    if device != "pretend":  # whose kernels are the CPU's: nothing new
        runs += [("bfloat16", "none", BFLOAT16), ("bfloat16", "full", BFLOAT16)]
    for dtype, recompute, bound in runs:
        here = on(device, train, path, dtype, recompute, exact=dtype == "float32")
        assert here["logp"].keys() == cpu["logp"].keys()
        apart = {
            "loss": max(abs(a - b) for a, b in zip(here["loss"], cpu["loss"], strict=True)),
            "grad_norm": max(abs(a - b) / b for a, b in zip(here["grad_norm"], cpu["grad_norm"], strict=True)),
            "mean log-prob": sum(abs(value - cpu["logp"][key]) for key, value in here["logp"].items()) / len(cpu["logp"]),
        }
        assert max(apart.values()) < bound, f"{dtype}, recompute {recompute}: {apart}, and {bound} is allowed"
        figures[f"{dtype}, recompute {recompute}"] = {**apart, "layers": here["layers"]}
    return figures
