"""A rank whose trained models go into checkpoints and come out of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoints.steps import Verified
from megarl.config import CheckpointSettings
from megarl.workers.rank import Rank

if TYPE_CHECKING:
    from megarl.parallel.checkpoint import Part, Saver

CHECKPOINTS = "checkpoints"  # folder of a run


class Keeper(Rank):
    """Saves and loads what `trained` says."""

    _saver: Saver | None = None

    def trained(self) -> Mapping[str, Part]:
        """The models with their optimizers, by name, on the device."""
        raise NotImplementedError

    def checkpoint(self, root: Path, step: int, settings: CheckpointSettings, extra: dict[str, bytes]) -> None:
        """Saves the trained models and their optimizers with the files `extra`; returns when what is saved may change again."""
        from megarl.parallel.checkpoint import Saver

        if self._saver is None:
            self._saver = Saver(root, self._grid, settings)
        self._saver.save(step, self.trained(), extra)

    def settle(self) -> None:
        """Waits until the last checkpoint is written. SaveError where it failed."""
        if self._saver is not None:
            self._saver.wait()

    def load(self, steps: Mapping[str, Verified]) -> None:
        """Gives the trained models and their optimizers what the step directories hold of them, and this process its random states."""
        from megarl.parallel.checkpoint import load, load_random

        parts = self.trained()
        for path in dict.fromkeys(steps[name].path for name in parts):
            inside = {name: part for name, part in parts.items() if steps[name].path == path}
            load(steps[next(iter(inside))], inside, self._grid)
        load_random(steps[next(iter(parts))], self._grid)
