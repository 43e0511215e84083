"""Where a run's numbers are written: always JSON lines, TensorBoard and trackers as the configuration says."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from megarl.config import ConfigError, LogSettings
from megarl.errors import Absent
from megarl.observe.trackers.base import TrackedRun, Tracker
from megarl.observe.trackers.mlflow import Mlflow
from megarl.observe.trackers.wandb import WeightsAndBiases
from megarl.text.display import one_line
from megarl.text.strict_json import lines_of, parse_json

TRACKERS: dict[str, type[Tracker]] = {"wandb": WeightsAndBiases, "mlflow": Mlflow}  # by their names in `log.trackers`


class Writer(Protocol):
    """Writes the scalars of each step, and is closed at the end."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Writes one JSON object per line, `step` first, flushed at once. As JSON has no nan, non-finite numbers are "nan", "inf" or "-inf".

    `write` raises OSError, with the file's name, if a line does not reach the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"step": step}
        row |= {name: value if math.isfinite(value) else str(value) for name, value in sorted(values.items())}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None

    def close(self) -> None:
        with suppress(OSError):  # for a line that `write` has already raised for
            self._file.close()


def read_json_lines(path: Path, skipped: int = 0) -> list[dict[str, float]]:
    """Read the rows that `JsonLines` wrote after the first `skipped` bytes, including non-finite numbers.

    A last line cut off by a crash is left out. Raises ConfigError, beginning with the file and the line, for a line that `JsonLines` did
    not write.
    """
    rows = []
    for place, line in lines_of(path, str(path), skipped):
        if not line.endswith(b"\n"):
            break
        try:
            rows.append({sys.intern(name): float(value) for name, value in parse_json(line).items()})  # one text for all rows
            if not math.isfinite(rows[-1]["step"]):
                raise ValueError
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
            raise ConfigError(f"{place}: not a row of metrics: {line.rstrip()!r:.80}") from None
    return rows


class TensorBoard:
    """Event files for `tensorboard --logdir runs`."""

    def __init__(self, directory: Path, purge: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), flush_secs=10, purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Writers:
    """All writers of a run as one, and its trackers.

    A tracker that fails does not end the run: it is reported, once for each tracker and start.

    Args:
        writers: what writes into the run's directory, where a failure raises.
        trackers: the trackers, by their names in `log.trackers`.
        report: shows the user a message.
    """

    def __init__(self, writers: Sequence[Writer], trackers: Mapping[str, Tracker], report: Callable[[str], None]) -> None:
        self._writers, self._trackers, self._report = writers, trackers, report
        self._failed: set[str] = set()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, values)
        for name, tracker in self._trackers.items():
            with self._reported(name):
                tracker.write(step, values)

    def close(self, *, failed: bool = False) -> None:
        """Close all of them. `failed`: whether this start of the run has failed, which trackers show."""
        for writer in self._writers:
            writer.close()
        for name, tracker in self._trackers.items():
            with self._reported(name):
                tracker.close(failed=failed)

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                self._report(failure(name, error))


def failure(tracker: str, error: Exception) -> str:
    """Return the message for a failure of a tracker."""
    return f"log.trackers: {tracker} misses numbers, which metrics.jsonl has: {one_line(f'{type(error).__name__}: {error}')}"


def check(settings: LogSettings) -> None:
    """Absent if a tracker is asked for whose package is not installed, or whose server nothing names."""
    for name in settings.trackers:
        package, variable = TRACKERS[name].package, TRACKERS[name].variable
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # W&B and MLflow leave folders of these names where they run, which import finds, too
            raise Absent(f"log.trackers: {name}: the package {package} is not installed (pip install {package})")
        if variable is not None and not os.environ.get(variable):
            raise Absent(f"log.trackers: {name}: the environment variable {variable} is not set")


def open_writers(run: TrackedRun, purge: int | None, report: Callable[[str], None]) -> Writers:
    """Open what a run is written to.

    Args:
        run: the run.
        purge: the first step that will be written again, of a run that resumes; None for one that begins.
        report: shows the user a message; it gets what fails of a tracker.

    Raises:
        ConfigError: as in `check`; or a tracker cannot be opened when the run begins.
    """
    check(run.settings)
    writers: list[Writer] = [JsonLines(run.directory / "metrics.jsonl")]
    if run.settings.tensorboard:
        writers.append(TensorBoard(run.directory / "tensorboard", purge))
    trackers: dict[str, Tracker] = {}
    for name in run.settings.trackers:
        try:
            trackers[name] = TRACKERS[name](run)
        except Exception as error:
            if purge is None:
                raise ConfigError(f"log.trackers: {name}: {one_line(f'{type(error).__name__}: {error}')}") from error
            report(failure(name, error))  # a run that comes back at night goes on without it
    return Writers(writers, trackers, report)
