"""Several sources as one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def mixed(parts: Sequence[tuple[Sequence[Item], float]], seed: int) -> list[Item]:
    """The items of all sources in their order, those of a source of weight w so often that they come w times in an epoch.

    Args:
        parts: items and weight of each source. The whole part of a weight repeats all of them, the rest takes a random share once.
        seed: of that draw.
    """
    found = list[Item]()
    for number, (items, weight) in enumerate(parts):
        whole, rest = divmod(weight, 1)
        chosen = sorted(random.Random(f"{seed}/{number}").sample(range(len(items)), round(rest * len(items))))
        found += list(items) * int(whole) + [items[index] for index in chosen]
    return found
