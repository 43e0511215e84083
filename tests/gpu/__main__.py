"""`python -m tests.gpu [PART ...]`: the five parts on one GPU, each within five minutes; figures on the screen, one line of JSON a part.

It needs torch, megatron-core, pydantic, numpy, psutil, safetensors, einops, packaging and PyYAML; no Ray, no vLLM, no Transformer Engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from tests.gpu import handing_over, numbers, shards, storing, training
from tests.gpu.process import Device, Rank

Open = Callable[..., Rank]


def part_1(rank: Open, directory: Path) -> dict[str, Any]:
    return numbers.check(rank("cuda"), rank("cpu"))


def part_2(rank: Open, directory: Path) -> dict[str, Any]:
    return training.check(rank("cuda"), rank("cpu"), directory, half=rank("cuda", exact=False))


def part_3(rank: Open, directory: Path) -> dict[str, Any]:
    return storing.check(rank("cuda"), rank("cpu"), directory)


def part_4(rank: Open, directory: Path) -> dict[str, Any]:
    return handing_over.check(rank("cuda"), "cuda_ipc")


def part_5(rank: Open, directory: Path) -> dict[str, Any]:
    return shards.check(rank("cuda", exact=False))


PARTS = {"1": part_1, "2": part_2, "3": part_3, "4": part_4, "5": part_5}


def main() -> int:
    import torch

    given = argparse.ArgumentParser(prog="python -m tests.gpu", description="What a GPU is to show, in five parts.")
    given.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, []], default=list(PARTS), help="1 to 5 (default: all)")
    parts = given.parse_args().parts
    if not torch.cuda.is_available():
        print(f"tests.gpu: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    failed = []
    for name in parts:
        begun = time.monotonic()
        with ExitStack() as ranks, tempfile.TemporaryDirectory() as directory:

            def rank(device: Device, *, exact: bool = True, ranks: ExitStack = ranks) -> Rank:
                return ranks.enter_context(closing(Rank(device, exact=exact)))

            try:
                told = "passed", json.dumps(PARTS[name](rank, Path(directory)))
            except Exception:
                failed.append(name)
                told = "FAILED", traceback.format_exc()
        print(f"part {name}: {told[0]} in {time.monotonic() - begun:.0f} s: {told[1]}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
