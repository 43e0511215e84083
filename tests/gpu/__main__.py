"""`python -m tests.gpu [PART ...]`: what one GPU is to show, within ten minutes; one line of JSON a part.

It needs torch, numpy, psutil, safetensors, einops, packaging, PyYAML and the packages of wheels.txt; neither Ray nor vLLM nor Transformer
Engine, whose layers it tries in bfloat16 where it is installed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tests.gpu import adapting, converting, handing_over, layers, memory, numbers, shards, storing, training
from tests.gpu.process import Ranks
from tests.gpu.report import Report

TOTAL_S, PART_S = 520.0, 150.0  # most seconds of all parts together, and of one


@dataclass(frozen=True)
class Work:
    """What a part works with."""

    ranks: Ranks
    report: Report
    directory: Path  # an empty one
    simulated: bool


def _training(work: Work) -> None:
    half = None if work.simulated else work.ranks.gpu()
    training.check(work.ranks.gpu(exact=True), work.ranks.cpu(), work.report, work.directory, half=half)


def _adapters(work: Work) -> None:
    half = None if work.simulated else work.ranks.gpu()
    adapting.check(work.ranks.gpu(exact=True), work.ranks.cpu(), work.report, work.directory, half=half)


def _storing(work: Work) -> None:
    storing.check(work.ranks.gpu(exact=True), work.ranks.cpu(), work.report, work.directory, memory=not work.simulated)


def _handing_over(work: Work) -> None:
    if work.simulated:  # its memory cannot be shared
        handing_over.check(work.ranks.cpu(), work.report, "shm", buckets=60, megabytes=2)
    else:
        handing_over.check(work.ranks.gpu(), work.report, "cuda_ipc")


def _measured(part: Callable[[Any, bool], dict[str, Any]]) -> Callable[[Work], None]:
    return lambda work: memory.check(work.ranks.gpu(), work.report, part, small=work.simulated)


# In the order in which they run: what most hangs on comes first.
PARTS: dict[str, Callable[[Work], None]] = {
    "device": _measured(memory.device),
    "shards": lambda work: shards.check(work.ranks.gpu(), work.report, small=work.simulated),
    "numbers": lambda work: numbers.check(work.ranks.gpu(exact=True), work.ranks.cpu(), work.report, small=work.simulated),
    "training": _training,
    "adapters": _adapters,
    "weights": _measured(memory.weights),
    "layers": lambda work: layers.check(work.ranks.gpu(), work.report, small=work.simulated),
    "parking": _measured(memory.parking),
    "optimizer": _measured(memory.optimizer),
    "conversion": lambda work: converting.check(work.ranks.gpu(), work.report, work.directory / "model", small=work.simulated),
    "offload": lambda work: storing.check_offload(work.ranks.gpu(), work.report, work.directory, equal=work.simulated),
    "storing": _storing,
    "handing_over": _handing_over,
}


def main() -> int:
    """Run the parts. Exit status: 0, 1 for a fault or no GPU, 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="What one GPU is to show.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write parts.jsonl and machine.txt there")
    parser.add_argument("--simulated", action="store_true", help="on a simulated GPU, in small: that everything runs")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"{', '.join(unknown)}: there is no such part; there are {', '.join(PARTS)}")
    import torch

    if not given.simulated and not torch.cuda.is_available():
        print(f"tests.gpu: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    name = "a simulated GPU" if given.simulated else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "machine.txt").write_text(_machine())
    parts, end, failures = given.parts or list(PARTS), time.monotonic() + TOTAL_S, []
    with closing(Ranks("pretend" if given.simulated else "cuda")) as ranks:
        for part in parts:
            line = _run(part, ranks, end, simulated=given.simulated)
            failures += [part] if line["faults"] else []
            text = json.dumps(line, default=str)
            print(text, flush=True)
            if given.out is not None:
                with (given.out / "parts.jsonl").open("a") as file:
                    file.write(text + "\n")
    passed = f"{len(parts) - len(failures)} of {len(parts)} parts passed"
    print(f"tests.gpu: {passed}" + (f"; faults in {', '.join(failures)}" if failures else ""), flush=True)
    return 1 if failures else 0


def _run(part: str, ranks: Ranks, end: float, *, simulated: bool) -> dict[str, Any]:
    """One part's line: its figures so far, whatever becomes of it."""
    begun, report = time.monotonic(), Report()
    ranks.deadline = min(end, begun + PART_S)
    if begun > end:
        report.faults.append(f"not run: {TOTAL_S:.0f} s are over")
    else:
        with report.section(part), tempfile.TemporaryDirectory() as directory:
            PARTS[part](Work(ranks, report, Path(directory), simulated))
    return {"part": part, "seconds": round(time.monotonic() - begun, 1), "figures": report.figures, "faults": report.faults}


def _machine() -> str:
    """What the machine is, for whoever reads the figures later."""
    try:
        gpus = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        gpus = f"nvidia-smi: {error}\n"
    packages = sorted({f"{one.name}=={one.version}" for one in distributions()}, key=str.lower)
    return "\n".join([gpus, f"Python {sys.version}", *packages, ""])


if __name__ == "__main__":
    sys.exit(main())
