"""What a finished run has left in its directory, for a script or a notebook."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.observe.writers import read_json_lines


@dataclass(frozen=True)
class RunResult:
    """The results of a run.

    Attributes:
        directory: the run's directory, with the models that it wrote, `model` and `critic`.
        summary: the content of summary.json: evaluations, alarms, seconds by phase, versions.
        metrics: the rows of metrics.jsonl: one for each step, and one for each evaluation.
    """

    directory: Path
    summary: dict[str, Any] = field(repr=False)
    metrics: list[dict[str, float]] = field(repr=False)

    @property
    def steps(self) -> list[dict[str, float]]:
        """The rows of the steps alone."""
        return [row for row in self.metrics if "perf/time_per_step" in row]


def read(directory: Path) -> RunResult:
    """Return the results of the finished run in `directory`."""
    return RunResult(directory, json.loads((directory / "summary.json").read_text()), read_json_lines(directory / "metrics.jsonl"))
