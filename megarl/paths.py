"""Names of files."""

from __future__ import annotations

import os
from pathlib import Path

MOST_NAME, MOST_PATH = 255, 2048  # bytes; the kernel takes paths of 4095, and files are made below


def nameable(path: Path) -> Path:
    """The path, if a file may have it. Raises ValueError with the numbers, where it is too long for any file system."""
    longest, whole = max((len(os.fsencode(part)) for part in path.parts), default=0), len(os.fsencode(path))
    if longest > MOST_NAME or whole > MOST_PATH:
        raise ValueError(f"a path of {whole} bytes, with a name of {longest} in it: at most {MOST_PATH} and {MOST_NAME} are allowed")
    return path
