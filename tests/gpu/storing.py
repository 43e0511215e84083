"""Parts storing and offload: checkpoints that cross from the CPU to the device and back, or from one kind of optimizer to the other; random
states, parking, exported bytes."""

import gc
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu.process import Run
from tests.gpu.report import Report, largest
from tests.gpu.training import FLOAT32

# Of an optimizer that is half on the CPU, against one that is not: Adam's arithmetic there rounds otherwise, and bfloat16 weights after it.
LOSS, LOGPROB = 1e-3, 0.05


def begin(grid: Any, path: Path, root: Path) -> dict[str, Any]:
    """Trains a step, saves, and takes two more."""
    from tests.distributed.checkpoint_work import train_and_save
    from tests.distributed.tiny_training import Job, make_checkpoint

    make_checkpoint(path)
    return asdict(train_and_save(grid, Job(path, steps=1), root))


def go_on(grid: Any, path: Path, step: Path, root: Path) -> dict[str, Any]:
    """Loads the step, saves it again as it is, and trains on."""
    from tests.distributed.checkpoint_work import resume
    from tests.distributed.tiny_training import Job

    return asdict(resume(grid, Job(path, steps=1), step, root))


def same(grid: Any, one: Path, other: Path) -> tuple[int, bool]:
    """How many tensors two saved policies hold, and whether they are the same ones, bit for bit."""
    import torch

    from tests.distributed.checkpoint_work import plain_tensors

    mine, theirs = plain_tensors(grid, one / "policy"), plain_tensors(grid, other / "policy")
    return len(mine), mine.keys() == theirs.keys() and all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items())


def park(grid: Any, path: Path) -> dict[str, Any]:
    """A trained model leaves the device and comes back: fingerprints of what is exported before and after, and the device's bytes."""
    import torch

    from megarl.config import ModelSettings, OptimizerSettings
    from megarl.parallel.backend import choose
    from megarl.ranks.model import Model
    from megarl.sync.fingerprint import Fingerprinter

    backend = choose()
    gc.collect()  # of what this process has trained before; cuBLAS's workspace stays
    base = torch.cuda.memory_allocated() if backend.device.type == "cuda" else 0
    settings = ModelSettings(path=path, dtype="float32")
    model = Model(path, settings, grid.layout, backend, grid, optimizer=OptimizerSettings(lr=1e-3), updates=3)

    def printed() -> dict[str, Any]:
        prints = Fingerprinter()
        for name, tensor in model.stream("bfloat16", by_stage=False):
            prints.add(name, tensor)
        return {name: (found.value, found.numel) for name, found in prints.digest().items()}

    def held() -> int:
        return (
            torch.cuda.memory_allocated() - base if backend.device.type == "cuda" else sum(p.untyped_storage().nbytes() for p in parameters)
        )

    parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
    before, there = printed(), held()
    model.park()
    away = held()
    model.wake()
    return {"before": before, "after": printed(), "bytes there": there, "bytes away": away}


def offload(grid: Any, path: Path, root: Path, step: Path | None, share: float) -> tuple[dict[str, Any], int]:
    """Trains in bfloat16 with so much of the optimizer on the CPU, from a step or from the start, where it also saves one.

    Returns the report, and how many of the optimizer's tensors are not on the device.
    """
    from megarl.models.description import ModelDescription
    from megarl.parallel.checkpoint.load import load
    from megarl.parallel.checkpoint.save import Saver
    from megarl.parallel.checkpoint.state import ModelState
    from tests.distributed.checkpoint_work import settings, verified
    from tests.distributed.tiny_training import Job, build, learn, make_checkpoint

    if not path.exists():
        make_checkpoint(path)
    fields = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": share, "overlap_cpu_optimizer_d2h_h2d": True}
    policy = build(grid, job := Job(path, sequences=4, micro_batches=1, dtype="bfloat16", optimizer={"megatron": fields} if share else {}))
    part = {"policy": ModelState(policy.chunks, ModelDescription.read(path), policy)}
    if step is None:
        learn(grid, policy, job)
        Saver(root, grid, settings()).save(1, part, {})
    else:
        load(verified(step), part, grid)
    report = learn(grid, policy, job)
    held = [one.optimizer.state.values() for one in policy.optimizer.chained_optimizers]
    moments = [entry["exp_avg"] for entries in held for entry in entries]
    return asdict(report), sum(not moment.is_cuda for moment in moments)


def check(there: Run, cpu: Run, report: Report, directory: Path, *, memory: bool = True) -> None:
    """CPU -> device -> CPU: nothing may be lost on the way.

    Args:
        there: runs on the device,
        cpu: on the CPU.
        report: of this part.
        directory: an empty one.
        memory: the device has memory of its own, and models are parked.
    """
    path, roots = directory / "tiny", [directory / name for name in ("cpu", "device", "back")]
    with report.section("crossing"):
        first = cpu(begin, path, roots[0])
        steps = [root / "step_000001" for root in roots]
        crossed = there(go_on, path, steps[0], roots[1])
        back = cpu(go_on, path, steps[1], roots[2])
        tensors, equal = cpu(same, steps[0], steps[1])
        apart = [abs(one["report"]["loss"][0] - first["report"]["loss"][0]) for one in (crossed, back)]
        report.figures |= {"tensors": tensors, "loss after the load": apart[0]}
        report.check(tensors > 30 and equal, "the CPU's checkpoint is not the same on the device")
        report.check(cpu(same, steps[1], steps[2]) == (tensors, True), "the device's checkpoint is not the same on the CPU")
        report.check(not crossed["exact"] and not back["exact"], "random states of one kind of device were used on another")
        report.check(
            crossed["random"][1:3] == first["random"][1:3] == back["random"][1:3], "numpy's or Python's random states do not go on"
        )
        report.check(largest(apart) < FLOAT32, f"losses after a load: {apart} apart, and {FLOAT32} is allowed")
    if memory:
        with report.section("parking"):
            parked = there(park, path)
            report.figures |= {"bytes there": parked["bytes there"], "bytes away": parked["bytes away"]}
            report.check(parked["before"] == parked["after"] == cpu(park, path)["before"], "a parked model exports other weights")
            report.check(parked["bytes away"] < 0.1 * parked["bytes there"], "a parked model stays in the device's memory")


def check_offload(there: Run, report: Report, directory: Path, *, equal: bool = False) -> None:
    """An optimizer of which half is in host memory trains, saves and loads as one that is not, in both directions.

    Args:
        there: runs on the device, in bfloat16.
        report: of this part.
        directory: an empty one.
        equal: both compute on the same kind of device: bit for bit.
    """
    path, whole, half = (directory / name for name in ("tiny", "whole", "half"))
    expected, none = there(offload, path, whole, None, 0.0)
    runs = {"half in host memory": (half, None, 0.5), "whole, resumed with half": (whole, 1, 0.5), "half, resumed whole": (half, 1, 0.0)}
    moments: dict[str, int] = {"whole": none}
    for name, (root, step, share) in runs.items():
        with report.section(name):
            again, moments[name] = there(offload, path, root, None if step is None else root / f"step_{step:06d}", share)
            apart = {
                "loss": largest(abs(one - other) for one, other in zip(again["loss"], expected["loss"], strict=True)),
                "log-prob": largest(abs(value - expected["logp"][key]) for key, value in again["logp"].items()),
            }
            report.figures[name] = apart
            report.check(again == expected or not equal, f"{name}: {apart} apart, on the same kind of device")
            report.check(apart["loss"] < LOSS and apart["log-prob"] < LOGPROB, f"{name}: {apart} apart; {LOSS}, {LOGPROB} are allowed")
            report.check((moments[name] > 0) == (share > 0), f"{name}: {moments[name]} moments are in host memory")
    report.figures["moments in host memory"] = moments
    report.check(none == 0, f"{none} moments are in host memory without offloading")
