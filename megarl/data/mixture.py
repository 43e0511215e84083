"""Several sources as one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from megarl.data.lazy import Item, LazySequence


class Mixture(LazySequence[Item]):
    """The items of all sources in their order, those of a source of weight w so often that they come w times in an epoch.

    Args:
        parts: items and weight of each source. The whole part of a weight repeats all of them, the rest takes a random share once.
        seed: of that draw.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[Item], float]], seed: int) -> None:
        self._parts = [items for items, _ in parts]
        self._chosen: list[np.ndarray] = []  # of each source, the places of the items that come
        for number, (items, weight) in enumerate(parts):
            whole, rest = divmod(weight, 1)
            share = sorted(random.Random(f"{seed}/{number}").sample(range(len(items)), round(rest * len(items))))
            self._chosen.append(np.concatenate([np.tile(np.arange(len(items)), int(whole)), np.array(share, dtype=np.int64)]))
        self._ends = np.cumsum([len(chosen) for chosen in self._chosen])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _at(self, places: Sequence[int]) -> list[Item]:
        found = []
        for place in places:
            part = int(np.searchsorted(self._ends, place, side="right"))
            chosen = self._chosen[part]
            found.append(self._parts[part][int(chosen[place - self._ends[part]])])  # counted from the part's end
        return found
