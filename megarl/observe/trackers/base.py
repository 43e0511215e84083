"""What every tracker is given, and what it does."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from megarl.config import LogSettings


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers show it."""

    id: str  # the same at every start of the run
    name: str
    directory: Path
    config: Mapping[str, Any]
    settings: LogSettings


class Tracker(Protocol):
    """A system that shows the runs of a project: one run here is one run there, however often it is started.

    A tracker is opened with a `TrackedRun`, and goes on with the run of its id if there is one.
    """

    package: ClassVar[str]  # what must be installed; imported when the tracker is opened
    variable: ClassVar[str | None]  # the environment variable that must say where the server is, if one must

    def __init__(self, run: TrackedRun) -> None: ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Report the numbers of a step, without waiting for a server."""

    def close(self, *, failed: bool) -> None:
        """Report what is still waiting, and how this start has ended."""
