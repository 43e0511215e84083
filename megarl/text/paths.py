"""Limits on the names of files."""

import os
from pathlib import Path

MAX_NAME, MAX_PATH = 255, 2048  # bytes; the kernel accepts paths of 4095, and files are created below these


def nameable(path: Path) -> Path:
    """Return the path if it is short enough for a file. Otherwise raise ValueError with the numbers."""
    longest, whole = max((len(os.fsencode(part)) for part in path.parts), default=0), len(os.fsencode(path))
    if longest > MAX_NAME or whole > MAX_PATH:
        raise ValueError(f"a path of {whole} bytes, with a name of {longest} in it: at most {MAX_PATH} and {MAX_NAME} are allowed")
    return path
