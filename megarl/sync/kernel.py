"""Compiles `fingerprint.c` at its first use, where there is a C compiler, and keeps it beside Triton's kernels for the next process."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_name("fingerprint.c")
_COMPILE_S = 60.0  # it takes less than a second


@cache
def compiled() -> ctypes.CDLL | None:
    """The functions of `fingerprint.c`; None where they cannot be compiled: torch can do their work, too."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    if compiler is None:
        return None
    # Machines that share a home directory may have different processors, for each of which it is compiled.
    features = re.search(r"^(flags|Features)\s*:.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    key = hashlib.blake2b(_SOURCE.read_bytes() + str(features and features[0]).encode(), digest_size=12).hexdigest()
    folder = Path(os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache")).expanduser()
    kept = folder / f"megarl-{key}.so"
    try:
        if not kept.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix="megarl-") as work:
                fresh = Path(work, "kernel.so")
                command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-o", str(fresh), str(_SOURCE)]
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMPILE_S)
                fresh.replace(kept)
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.SubprocessError):
        return None
