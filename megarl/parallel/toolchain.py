"""What Triton needs of a machine besides the GPU: a C compiler and Python's headers.

At its first kernel in a process Triton compiles an extension module of its own (triton 3.7.1: runtime/build.py:20-49,
backends/nvidia/driver.py:65-72), unless TRITON_CACHE_DIR has it already. Ranks and engines on GPUs all do so.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from megarl.text.display import one_line

NEEDED_BY = "Triton, which compiles kernels for ranks and engines, needs it"


def lacking(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return which of the two this machine lacks, with what to do about it, in one line; None if it has both.

    Args:
        environ: the environment variables, of which CC and PATH are read.
    """
    path, chosen = environ.get("PATH", os.defpath), environ.get("CC")
    if chosen is not None and shutil.which(chosen, path=path) is None:  # Triton starts CC as it is, without splitting it
        return f"no C compiler: CC={chosen} is not a program (unset it to use gcc or clang from PATH); {NEEDED_BY}"
    if chosen is None and not any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        return f"no C compiler: no gcc or clang in PATH, and CC is not set; {NEEDED_BY}"
    header = headers() / "Python.h"
    if not header.is_file():
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return f"{header} is missing: install {version}-dev (Debian, Ubuntu) or {version}-devel (RHEL), or a Python from uv; {NEEDED_BY}"
    return None


def headers() -> Path:
    """Return the directory in which Triton looks for Python.h (runtime/build.py:37-41)."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def fault(error: Exception, output: str = "") -> str | None:
    """Explain a failure of Triton that is the machine's fault, and no GPU's, in one line. None if `error` is none of these.

    Args:
        error: what Triton raised.
        output: what the compiler printed.
    """
    no_compilation = isinstance(error, subprocess.CalledProcessError | FileNotFoundError) or "C compiler" in str(error)
    if no_compilation and (lack := lacking()) is not None:
        return lack
    if isinstance(error, subprocess.CalledProcessError):
        complaint = next((line for line in output.splitlines() if "error" in line or "cannot find" in line), output)
        return f"{error.cmd[0]} fails with status {error.returncode}: {one_line(complaint)}; {NEEDED_BY}"
    if any(name in str(error) for name in ("libcuda.so", "ldconfig")):  # driver.py:25-45
        return f"no libcuda.so.1 in `ldconfig -p` or LD_LIBRARY_PATH (TRITON_LIBCUDA_PATH names its folder); {NEEDED_BY}"
    if isinstance(error, OSError | ImportError):  # Triton's cache is on a disk that is full, read-only, or mounted with noexec
        return f"TRITON_CACHE_DIR={os.environ.get('TRITON_CACHE_DIR', '~/.triton/cache')}: {one_line(str(error))}; {NEEDED_BY}"
    return None
