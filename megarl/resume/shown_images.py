"""The images that environments have shown to a run: which of them go.

They lie in `IMAGES`, in a folder for each step that episodes were requested for. A step's folder goes once no response to learn from can
refer to it: neither of this run as it goes on, nor of one that resumes from a checkpoint that is kept or from a copy in memory.
"""

import json
import shutil
from collections import deque
from pathlib import Path

from megarl.checkpoints.steps import CHECKPOINTS, finished_steps
from megarl.image_source import IMAGES
from megarl.resume.copies import KEPT as COPIES
from megarl.resume.point import TRAINER

SHOWN_STEPS = 8  # the last steps, whose images stay for the report and for `megarl samples`


class ShownImages:
    """Removes images of a run that nothing needs any more.

    Args:
        run: the run's directory.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._oldest = deque([0] * COPIES, maxlen=COPIES)  # after the last steps, as copies in memory have it
        self._saved: dict[Path, int] = {}

    def after_step(self, step: int, oldest: int) -> None:
        """Remove the folders of steps that are not needed. That of step 0 stays: what was shown at the start, and to fixed sets.

        Args:
            step: the number of steps so far.
            oldest: the first step that episodes were requested for from which is still to be learned (`TrainState.oldest`).
        """
        self._oldest.append(oldest)
        folder = self._run / IMAGES
        if not folder.is_dir():
            return
        self._saved = {path: self._saved.get(path) or _oldest(path) for path in finished_steps(self._run / CHECKPOINTS)}
        first = min([step + 1 - SHOWN_STEPS, *self._oldest, *self._saved.values()])
        for path in folder.iterdir():
            if path.name.isdecimal() and 0 < int(path.name) < first:
                shutil.rmtree(path, ignore_errors=True)  # an engine that was given up may still write to it


def _oldest(checkpoint: Path) -> int:
    """Return `oldest` as a checkpoint has it; 0 for one of an earlier version, or a damaged one."""
    try:
        return int(json.loads((checkpoint / TRAINER).read_bytes())["progress"]["oldest"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
