"""run.json: which run this is, and what each of its starts has taken, rewritten with every row of the metrics: a killed start counts."""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megarl.checkpoints.may_differ import held_by
from megarl.config import RunSettings, TrainingSettings

RECORD = "run.json"
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class RunStart:
    """What one start of a run has taken."""

    gpus: int
    wall_s: Mapping[str, float]  # by phase
    commit: str | None = None  # of megarl's source, as in summary.json; earlier versions wrote none

    @property
    def seconds(self) -> float:
        """The seconds of all phases."""
        return sum(self.wall_s.values())


@dataclass(frozen=True)
class RunRecord:
    """A run, over all of its starts: the first, and those that resumed."""

    id: str  # of the run in trackers
    verb: str
    inputs: Mapping[str, Mapping[str, str]]  # by dotted key: fingerprints of the files that its results depend on
    step: int  # the last one so far
    starts: tuple[RunStart, ...]

    @property
    def wall_s(self) -> dict[str, float]:
        """The seconds of all starts by phase."""
        total = Counter[str]()
        for start in self.starts:
            total.update(start.wall_s)
        return {phase: round(seconds, 3) for phase, seconds in total.items()}

    @property
    def gpu_s(self) -> float:
        """The seconds of all starts, times the number of their GPUs."""
        return round(sum(start.gpus * start.seconds for start in self.starts), 3)

    def on(self, gpus: int) -> RunRecord:
        """Return the record with the number of GPUs of the last start."""
        return replace(self, starts=(*self.starts[:-1], replace(self.starts[-1], gpus=gpus)))

    def spent(self, wall_s: Mapping[str, float], step: int) -> RunRecord:
        """Return the record after the last start has taken `wall_s` and reached `step`."""
        last = replace(self.starts[-1], wall_s={phase: round(seconds, 3) for phase, seconds in wall_s.items()})
        return replace(self, starts=(*self.starts[:-1], last), step=step)


_KINDS = TypeAdapter(RunRecord)


def begin(config: RunSettings, commit: str | None, *, resumes: bool) -> RunRecord:
    """Return the record of a run that starts.

    Args:
        config: the run's configuration.
        commit: that of megarl's source.
        resumes: whether it goes on with the run in its directory. Where that has no readable record, this start counts as the first.
    """
    inputs = held_by(config.model_dump()) if isinstance(config, TrainingSettings) else {}
    earlier = read(config.directory) if resumes else None
    new = RunRecord(secrets.token_hex(8), config.verb, inputs, 0, ())
    return replace(earlier or new, starts=(*(earlier or new).starts, RunStart(0, {}, commit)))


def read(directory: Path) -> RunRecord | None:
    """Read the record of the run in a directory; None if it has none that can be read."""
    try:
        with (directory / RECORD).open("rb") as file:
            return _KINDS.validate_json(file.read(MAX_BYTES))
    except (OSError, ValidationError):
        return None


def write(directory: Path, record: RunRecord) -> None:
    """Write the record; a reader sees the old one or the new one."""
    partial = directory / f".{RECORD}.partial"
    partial.write_bytes(_KINDS.dump_json(record))
    os.replace(partial, directory / RECORD)
