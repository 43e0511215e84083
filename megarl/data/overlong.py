"""Items of a source that have more tokens than they may have: refused, or left out and counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from megarl.errors import ConfigError

Item = TypeVar("Item")
Made = TypeVar("Made")


class TooLong(ConfigError):
    """One of them, in one line."""


class Overlong:
    """What becomes of them (`data.overlong`).

    Args:
        drop: leave them out; else the first is refused.

    Attributes:
        dropped: how many were left out so far.
    """

    def __init__(self, drop: bool = False) -> None:
        self._drop, self.dropped = drop, 0

    def made(self, items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
        """What `make` makes of each item, without those that it calls TooLong. Raises that where they are refused."""
        found = list[Made]()
        for item in items:
            try:
                found.append(make(item))
            except TooLong:
                if not self._drop:
                    raise
                self.dropped += 1
        return found

    def tell(self, kept: int, key: str, limit: str) -> None:
        """Says on stderr how many were left out. ConfigError where that is all of them.

        Args:
            kept: how many were not.
            key: of the source.
            limit: what they exceed.
        """
        if not self.dropped:
            return
        if not kept:
            raise ConfigError(f"{key}: nothing is left: all {self.dropped:,} are longer than {limit}")
        total = self.dropped + kept
        print(f"megarl: {key}: {self.dropped:,} of {total:,} are longer than {limit}, and left out (data.overlong=drop)", file=sys.stderr)
