"""Signs of a run that goes wrong, each a named warning, given once."""

from __future__ import annotations

import math
from collections.abc import Mapping

# A collapse is a fall below this share of the first value, in reinforcement learning: supervised training lowers the entropy by design.
COLLAPSE = {
    "entropy_collapse": ("actor/entropy", 0.01),
    "length_collapse": ("response_length/mean", 0.1),
}


class Alarms:
    """Watches the scalars of each step."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._given: set[str] = set()

    def check(self, step: int, values: Mapping[str, float]) -> dict[str, str]:
        """What is new and wrong in this step: the event's name and a message with the numbers."""
        found = {f"non_finite/{name}": f"step {step}: {name} is {value}" for name, value in values.items() if not math.isfinite(value)}
        for event, (name, share) in COLLAPSE.items():
            value = values.get(name)
            if value is not None and "reward/mean" in values:
                first = self._first.setdefault(name, value)
                if value < share * first:
                    found[event] = f"step {step}: {event.replace('_', ' ')}: {name} is {value:.3g}, and was {first:.3g} at first"
        new = {event: message for event, message in found.items() if event not in self._given}
        self._given |= new.keys()
        return new
