"""Items of a source that exceed the token limit: refused, or left out and counted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from megarl.errors import ConfigError

Item = TypeVar("Item")
Made = TypeVar("Made")


class TooLong(ConfigError):
    """An item exceeds the token limit; one line."""


class Overlong:
    """What to do with items that exceed the token limit (`data.overlong`).

    Args:
        drop: leave them out; otherwise the first is refused.

    Attributes:
        dropped: how many have been left out so far.
    """

    def __init__(self, drop: bool = False) -> None:
        self._drop, self.dropped = drop, 0

    def made(self, items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
        """Apply `make` to each item; leave out those for which it raises TooLong, or re-raise if such items are refused."""
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
        """Report on stderr how many items were left out. Raise ConfigError if all of them were.

        Args:
            kept: how many were not left out.
            key: the source's dotted key.
            limit: the limit that they exceed, as text.
        """
        if not self.dropped:
            return
        if not kept:
            raise ConfigError(f"{key}: nothing is left: all {self.dropped:,} are longer than {limit}")
        total = self.dropped + kept
        print(f"megarl: {key}: {self.dropped:,} of {total:,} are longer than {limit}, and left out (data.overlong=drop)", file=sys.stderr)
