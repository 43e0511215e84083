"""Environment variables of the user's shell: a run uses them, or names them at its start, because its configuration says otherwise."""

import os
from collections.abc import Iterable, Mapping

# GPUs: float32 is multiplied in full precision. The first is read by cuBLAS, the second by torch when it is imported (ATen/Context.h:497);
# NVIDIA's containers of PyTorch come with the second set to 1.
FULL_PRECISION = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}


def differing(own: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that `environ` sets to other values than a run's processes do.

    Args:
        own: what the run's processes set.
        environ: the environment of the shell.
    """
    return [name for name, value in own.items() if environ.get(name, value) != value]


def named(names: Iterable[str]) -> str | None:
    """Return the line that names the variables that are not used; None if there are none."""
    unused = ", ".join(sorted(set(names)))
    return f"of the environment, not used: {unused} (it would change what is computed, or contradict the configuration)" if unused else None
