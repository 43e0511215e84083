"""What this machine has, found out without starting anything on a GPU."""

from __future__ import annotations

import os
from pathlib import Path


def gpus_here(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that a process started here sees: the machine's, or those that CUDA_VISIBLE_DEVICES leaves of them."""
    present, wish = sum(1 for _ in devices.glob("nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES")
    if wish is None:
        return present
    chosen = [one.strip() for one in wish.split(",")]
    return min(present, next((index for index, one in enumerate(chosen) if one in ("", "-1")), len(chosen)))  # CUDA stops there
