"""The model of a run's best evaluation."""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Best:
    """Which evaluation was the best so far, and its model in a folder of the run.

    Args:
        folder: where the model is kept.
        measure: what the evaluations measure, and on what, as plain values for JSON: numbers of two measures do not compare.

    Attributes:
        step: of that evaluation.
        waited: how many have come since.
    """

    def __init__(self, folder: Path, measure: Any) -> None:
        self._folder, self._measure = folder, measure
        self._record: tuple[float, ...] | None = None
        self.step = self.waited = 0

    @property
    def path(self) -> Path:
        """Where the model is kept."""
        return self._folder / f"{self.step:06d}"

    @property
    def kept(self) -> bool:
        """Whether there is one."""
        return self._record is not None and self.path.is_dir()

    def improves(self, step: int, *score: float) -> bool:
        """Takes an evaluation: is it better than all before? Of two with the same first number, the second decides, and so on.

        One with a number that is none (nan) is better than none, and worse than any other.
        """
        if self._record is not None and not any(map(math.isnan, self._record)) and not score > self._record:
            self.waited += 1
            return False
        self._record, self.step, self.waited = score, step, 0
        return True

    def keep(self, save: Callable[[Path], None]) -> None:
        """Saves the model in the place of the one before."""
        if self.path.exists():  # of a process that went further before it was killed
            _discard(self.path)
        save(self.path)
        for other in self._folder.iterdir():
            if other != self.path:
                _discard(other)

    def leave(self, model: Path) -> None:
        """The model once more, as the one that the run leaves."""
        partial = model.with_name(f".{model.name}.partial-best")
        shutil.copytree(self.path, partial, copy_function=_link)
        partial.rename(model)

    def state(self) -> list[Any]:
        """As plain values for JSON."""
        return [self._measure, self._record, self.step, self.waited]

    def restore(self, state: list[Any]) -> None:
        """Stands where `state` was taken; at the beginning where that was of another measure.

        Where the best model is gone, a better one had come after `state` and taken its place: that one will come again.
        """
        measure, record, step, waited = state
        if measure == self._measure and record is not None and (self._folder / f"{step:06d}").is_dir():
            self._record, self.step, self.waited = tuple(record), step, waited


def _discard(model: Path) -> None:
    """Removes a directory; under its name it is there whole or not at all."""
    shutil.rmtree(model.rename(model.with_name(f".{secrets.token_hex(4)}")))


def _link(source: str, target: str) -> None:
    """Two names for one file, where the file system has that: a model may be large, and a run that is started again finds its best one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
