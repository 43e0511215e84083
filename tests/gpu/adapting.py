"""Part adapters: gradients of low-rank adapters beside the device's layers, against float32 on the CPU."""

from pathlib import Path
from typing import Any, Literal

from tests.gpu.process import Run
from tests.gpu.report import Report

# Of the length of the whole gradient; set before any GPU ran. Float32: other kernels. Bfloat16: 8 bits of mantissa in every layer.
FLOAT32, BFLOAT16 = 1e-4, 0.1


def gradients(grid: Any, path: Path, dtype: Literal["float32", "bfloat16"]) -> dict[str, Any]:
    """The gradient of every factor of the tiny model, which is made where it is not there yet; the kind of its layers."""
    from megarl.config import LoraSettings
    from megarl.parallel.backend import choose
    from megarl.parallel.lora import adapters_of
    from tests.distributed.tiny_training import Job, build, learn, make_checkpoint

    if not path.exists():
        make_checkpoint(path)
    job = Job(path, dtype=dtype, recompute="full", lora=LoraSettings(rank=4, alpha=6.0), optimizer={"clip_grad": 1e9})
    policy = build(grid, job)
    learn(grid, policy, job)
    parts = [part for adapter in adapters_of(policy.chunks).values() for part in adapter.parts()]
    return {"gradients": {weight.name: factor.main_grad.cpu() for weight, factor in parts}, "fused": choose().fused}  # type: ignore[attr-defined]


def check(there: Run, cpu: Run, report: Report, directory: Path, half: Run | None = None) -> None:
    """Computes the gradients on the device and on the CPU, and compares.

    Args:
        there: runs on the device, in exact float32,
        cpu: on the CPU.
        report: of this part.
        directory: an empty one.
        half: runs on the device, in bfloat16; None: that is left out.
    """
    path = directory / "tiny"
    expected = cpu(gradients, path, "float32")["gradients"]
    length = sum(float(one.square().sum()) for one in expected.values()) ** 0.5
    runs = [(there, "float32", FLOAT32), *([(half, "bfloat16", BFLOAT16)] if half is not None else [])]
    for run, dtype, bound in runs:
        with report.section(dtype):
            here = run(gradients, path, dtype)
            assert here["gradients"].keys() == expected.keys() and length > 0
            apart = sum(float((one - expected[name]).square().sum()) for name, one in here["gradients"].items()) ** 0.5 / length
            report.figures[dtype] = {"apart": apart, "factors": len(expected), "fused": here["fused"]}
            report.check(apart < bound, f"{dtype}: {apart:.2g} of the gradient's length apart, and {bound:g} is allowed")
