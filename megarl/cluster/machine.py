"""What this machine has, found out without starting anything on a GPU."""

import ctypes
import os
from pathlib import Path


def gpus_here(devices: Path = Path("/dev")) -> int:
    """The number of NVIDIA GPUs that a process started here sees: the machine's, or those that CUDA_VISIBLE_DEVICES leaves of them."""
    present, wish = sum(1 for _ in devices.glob("nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES")
    if wish is None:
        return present
    chosen = [one.strip() for one in wish.split(",")]
    return min(present, next((index for index, one in enumerate(chosen) if one in ("", "-1")), len(chosen)))  # CUDA stops there


def capability_here() -> tuple[int, int] | None:
    """The compute capability of this machine's first GPU, as the driver's management library knows it; None if it does not."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu)) or nvml.nvmlDeviceGetCudaComputeCapability(
        gpu, ctypes.byref(major), ctypes.byref(minor)
    )
    nvml.nvmlShutdown()
    return None if failed else (major.value, minor.value)
