"""The step directories of a run that are whole, every byte of them."""

from collections.abc import Callable
from pathlib import Path

from megarl.checkpoints.steps import Entry, SavedStep, listing


def newest(root: Path, skipped: Callable[[Entry], None]) -> SavedStep | None:
    """The newest; each newer one goes to `skipped`."""
    for entry in listing(root):
        if entry.saved is not None:
            return entry.saved
        skipped(entry)
    return None
