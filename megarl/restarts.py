"""What of a run has failed and started again: how often it may, and what is told of it."""

from __future__ import annotations

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
    """One failure that a run has gone on after.

    Attributes:
        kind: what failed; of a node, all that was on it.
        fault: what was seen of it.
        detection_s: for how long it had been stopped or late when it was seen. Of a process that ended Ray tells at once: 0.
        recovery_s: from then on, until the run went on.
        lost_steps: steps that were done and are done again; the one that was under way is not counted.
    """

    kind: RestartKind
    fault: str
    detection_s: float = 0.0
    recovery_s: float = 0.0
    lost_steps: int = 0

    def metrics(self) -> dict[str, float]:
        """As numbers of a step's row."""
        numbers = {self.kind: 1.0, "detection_s": self.detection_s, "recovery_s": self.recovery_s, "lost_steps": float(self.lost_steps)}
        return {RESTART: 1.0, **{f"{RESTART}/{name}": value for name, value in numbers.items()}}


class Restarts:
    """Counts the restarts of a process of the command line, in any 24 hours.

    Args:
        most: so many; 0: none.
        tell: is given each when the run goes on.
        note: is given a line when one begins.
    """

    def __init__(self, most: int, tell: Callable[[Restart], object], note: Callable[[str], object]) -> None:
        self._most, self._tell, self._note = most, tell, note
        self._times: deque[float] = deque()

    def allow(self, fault: Exception) -> bool:
        """Counts one more, where it is allowed."""
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
        """A recovery inside, which is timed and, where it succeeds, told."""
        begun = time.monotonic()
        restart = Restart(kind, str(fault), getattr(fault, "seconds", 0.0))
        yield restart
        restart.recovery_s = time.monotonic() - begun
        self._tell(restart)
