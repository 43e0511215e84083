"""Limits on the names of files."""

from __future__ import annotations

import os
from pathlib import Path

MOST_NAME, MOST_PATH = 255, 2048  # bytes; the kernel accepts paths of 4095, and files are created below these


def nameable(path: Path) -> Path:
    """Return the path if it is short enough for a file. Otherwise raise ValueError with the numbers."""
    longest, whole = max((len(os.fsencode(part)) for part in path.parts), default=0), len(os.fsencode(path))
    if longest > MOST_NAME or whole > MOST_PATH:
        raise ValueError(f"a path of {whole} bytes, with a name of {longest} in it: at most {MOST_PATH} and {MOST_NAME} are allowed")
    return path
