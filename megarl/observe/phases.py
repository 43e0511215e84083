"""Where a run's time goes: every moment belongs to exactly one phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OTHER = "other"  # time outside every phase


class Phases:
    """`with phases("rollout"): ...` charges the time inside to "rollout", less the time of phases nested in it.

    The phases thus add up to the wall time, however they nest. For use by one thread; `current` may be called from any.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()  # charged up to here
        self._stack: list[tuple[str, float]] = [(OTHER, self._since)]
        self._total: dict[str, float] = defaultdict(float)
        self._taken: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Enter the phase `name` for the duration of the block, even if the block raises."""
        self._charge()
        self._stack.append((name, self._since))
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def current(self) -> tuple[str, float]:
        """The innermost phase and the seconds since it was entered."""
        name, entered = self._stack[-1]
        return name, self._clock() - entered

    def total(self) -> dict[str, float]:
        """Seconds by phase since the start; their sum is the wall time."""
        self._charge()
        return dict(self._total)

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last `take`, without phases that did not run."""
        total = self.total()
        seconds_by_phase = {name: seconds - self._taken.get(name, 0.0) for name, seconds in total.items()}
        self._taken = total
        return {name: seconds for name, seconds in seconds_by_phase.items() if seconds > 0}

    def _charge(self) -> None:
        now = self._clock()
        self._total[self._stack[-1][0]] += now - self._since
        self._since = now
