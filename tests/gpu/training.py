"""Part training: a grid of one rank over NCCL, a tiny MoE forward, three optimizer steps; against the same in float32 on the CPU."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from tests.gpu.process import Run
from tests.gpu.report import Report, largest

# Set before any GPU ran. Float32: other kernels and orders of summation through three steps of Adam. Bfloat16: 8 bits of mantissa.
FLOAT32, BFLOAT16 = 2e-4, 0.1


def train(grid: Any, path: Path, dtype: Literal["float32", "bfloat16"], recompute: Literal["none", "full"]) -> dict[str, Any]:
    """Three steps of the tiny model, which is made where it is not there yet: what they gave, and what the backend notes of its layers."""
    from megarl.parallel.backend import choose
    from tests.distributed.tiny_training import Job, make_checkpoint, train

    if not path.exists():
        make_checkpoint(path)
    return {**asdict(train(grid, Job(path, steps=3, dtype=dtype, recompute=recompute))), "layers": choose().note}


def check(there: Run, cpu: Run, report: Report, directory: Path, half: Run | None = None) -> None:
    """Trains on the device and on the CPU, and compares.

    Args:
        there: runs on the device, in exact float32,
        cpu: on the CPU.
        report: of this part.
        directory: an empty one.
        half: runs on the device, in bfloat16; None: that is left out.
    """
    path = directory / "tiny"
    expected = cpu(train, path, "float32", "none")
    assert len(expected["logp"]) > 100
    runs = [(there, "float32", "none", FLOAT32)]
    runs += [(half, "bfloat16", recompute, BFLOAT16) for recompute in ("none", "full")] if half is not None else []
    for run, dtype, recompute, bound in runs:
        name = f"{dtype}, recompute {recompute}"
        with report.section(name):
            here = run(train, path, dtype, recompute)
            assert here["logp"].keys() == expected["logp"].keys()
            apart = {
                "loss": largest(abs(a - b) for a, b in zip(here["loss"], expected["loss"], strict=True)),
                "grad_norm": largest(abs(a - b) / b for a, b in zip(here["grad_norm"], expected["grad_norm"], strict=True)),
                "mean log-prob": sum(abs(value - expected["logp"][key]) for key, value in here["logp"].items()) / len(expected["logp"]),
            }
            report.figures[name] = {**apart, "layers": here["layers"]}
            report.check(largest(apart.values()) < bound, f"{name}: {apart}, and {bound} is allowed")
