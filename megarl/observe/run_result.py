"""What a finished run has left in its directory, for a script or a notebook."""

from __future__ import annotations

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
        metrics: the rows of metrics.jsonl.
    """

    directory: Path
    summary: dict[str, Any] = field(repr=False)
    metrics: list[dict[str, float]] = field(repr=False)


def read(directory: Path) -> RunResult:
    """Return the results of the finished run in `directory`."""
    return RunResult(directory, json.loads((directory / "summary.json").read_text()), read_json_lines(directory / "metrics.jsonl"))
