"""Restarts of the parts of a run that have failed: how many are allowed, and what is reported about each."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

WINDOW_S = 86_400.0
RESTART = "events/restart"

RestartKind = Literal["engine", "rank", "node"]


@dataclass
class Restart:
    """A failure after which a run has continued.

    Attributes:
        kind: what failed; "node" means everything on it.
        fault: what was observed.
        detection_s: how long it had been stopped or late when that was detected; 0 for a process that ended, which Ray reports at once.
        recovery_s: from detection until the run continued.
        lost_steps: completed steps that are repeated; the step in progress is not counted.
    """

    kind: RestartKind
    fault: str
    detection_s: float = 0.0
    recovery_s: float = 0.0
    lost_steps: int = 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this restart for a step's row."""
        numbers = {self.kind: 1.0, "detection_s": self.detection_s, "recovery_s": self.recovery_s, "lost_steps": float(self.lost_steps)}
        return {RESTART: 1.0, **{f"{RESTART}/{name}": value for name, value in numbers.items()}}


class Restarts:
    """Count the restarts of one process of the command line, within any 24 hours.

    Args:
        most: the most restarts allowed within 24 hours; 0 for none.
        tell: called with each restart when the run continues.
        note: called with a line of text when a restart begins.
    """

    def __init__(self, most: int, tell: Callable[[Restart], object], note: Callable[[str], object]) -> None:
        self._most, self._tell, self._note = most, tell, note
        self._times: deque[float] = deque()

    def allow(self, fault: Exception) -> bool:
        """Return whether one more restart is allowed, and count it if so."""
        now = time.monotonic()
        while self._times and now - self._times[0] > WINDOW_S:
            self._times.popleft()
        if len(self._times) >= self._most:
            if self._most:
                self._note(f"{len(self._times)} restarts within a day are the most that cluster.restarts={self._most} allows")
            return False
        self._times.append(now)
        self._note(f"restart {len(self._times)} of at most {self._most} per day (cluster.restarts): {fault}")
        return True

    @contextmanager
    def recovery(self, kind: RestartKind, fault: Exception) -> Iterator[Restart]:
        """Time the recovery that happens inside the block, and report it if it succeeds."""
        start = time.monotonic()
        restart = Restart(kind, str(fault), getattr(fault, "seconds", 0.0))
        yield restart
        restart.recovery_s = time.monotonic() - start
        self._tell(restart)
