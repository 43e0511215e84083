"""What a part gives: its figures, and its faults, none of which keeps the part from going on."""

import math
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SHOWN = 2_000  # characters of a traceback, from its end


def largest(values: Iterable[float]) -> float:
    """The largest number, and NaN if there is one: Python's `max` may lose it."""
    numbers = list(values)
    return next((number for number in numbers if math.isnan(number)), max(numbers))


@dataclass
class Report:
    """Filled by a part while it runs, so that what it has measured is there however it ends."""

    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def check(self, holds: bool, fault: str) -> None:
        """Note `fault` unless the bound holds."""
        if not holds:
            self.faults.append(fault)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Note an exception of the block as a fault, and go on after it."""
        try:
            yield
        except Exception:
            self.faults.append(f"{name}: {traceback.format_exc()[-SHOWN:]}")
