"""The model of a run's best evaluation."""

import math
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Best:
    """Tracks the best evaluation so far, and keeps its model in a folder of the run.

    Args:
        folder: where the model is kept.
        measure: what the evaluations measure, and on what, as plain values for JSON; numbers of different measures are not comparable.

    Attributes:
        step: the step of the best evaluation.
        waited: the number of evaluations since then.
    """

    def __init__(self, folder: Path, measure: Any) -> None:
        self._folder, self._measure = folder, measure
        self._record: tuple[float, ...] | None = None
        self.step = self.waited = 0

    @property
    def path(self) -> Path:
        """Where the best model is kept."""
        return self._folder / f"{self.step:06d}"

    @property
    def kept(self) -> bool:
        """Whether a best model is kept."""
        return self._record is not None and self.path.is_dir()

    def improves(self, step: int, *score: float) -> bool:
        """Record an evaluation; return whether it is better than all before. At equal first numbers the second decides, and so on.

        An evaluation with a nan is better than no evaluation, and worse than any without.
        """
        if self._record is not None and not _broken(self._record) and (_broken(score) or not score > self._record):
            self.waited += 1
            return False
        self._record, self.step, self.waited = score, step, 0
        return True

    def keep(self, save: Callable[[Path], None]) -> None:
        """Save the model in place of the previous best."""
        if self.path.exists():  # left by a process that got further before it was killed
            _discard(self.path)
        save(self.path)
        for other in self._folder.iterdir():
            if other != self.path:
                _discard(other)

    def leave(self, model: Path) -> None:
        """Put the best model at `model` as the run's final one."""
        partial = model.with_name(f".{model.name}.partial-best")
        shutil.copytree(self.path, partial, copy_function=_link)
        partial.rename(model)

    def state(self) -> list[Any]:
        """Return the state as plain values for JSON."""
        return [self._measure, self._record, self.step, self.waited]

    def restore(self, state: list[Any]) -> None:
        """Restore `state`; start anew if it was taken with another measure.

        If its best model is gone, a better one had replaced it after `state` was taken, and will come again.
        """
        measure, record, step, waited = state
        if measure == self._measure and record is not None and (self._folder / f"{step:06d}").is_dir():
            self._record, self.step, self.waited = tuple(record), step, waited


def _broken(score: tuple[float, ...]) -> bool:
    return any(map(math.isnan, score))


def _discard(model: Path) -> None:
    """Remove a model directory; at its own path it is complete or absent at all times."""
    shutil.rmtree(model.rename(model.with_name(f".{secrets.token_hex(4)}")))


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the file system has no links.

    A model may be large, and cannot be moved instead: a restarted run must still find its best one.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
