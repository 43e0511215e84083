"""Several weighted sources as one sequence."""

import random
from collections.abc import Sequence

import numpy as np

from megarl.data.gym import all_drawn
from megarl.data.lazy import Item, LazySequence
from megarl.errors import ConfigError


class Mixture(LazySequence[Item]):
    """The items of all sources in order, where the items of a source of weight w come up w times per epoch.

    Args:
        parts: items and weight of each source. The integer part of a weight repeats all items; the fraction adds a random share once.
        seed: seed of the random draw.
        key: the mixture's dotted key, such as "data.train".

    Raises:
        ConfigError: no item comes up.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[Item], float]], seed: int, key: str) -> None:
        self._parts = [items for items, _ in parts]
        self._chosen: list[np.ndarray] = []  # for each source, the indices of the items that come up
        for number, (items, weight) in enumerate(parts):
            whole, rest = divmod(weight, 1)
            share = sorted(random.Random(f"{seed}/{number}").sample(range(len(items)), round(rest * len(items))))
            self._chosen.append(np.concatenate([np.tile(np.arange(len(items)), int(whole)), np.array(share, dtype=np.int64)]))
        if not any(len(indices) for indices in self._chosen):
            if all_drawn():
                most, total = max(len(items) * weight for items, weight in parts), sum(len(items) for items, _ in parts)
                raise ConfigError(f"{key}.parts: the weights choose none of {total:,} items: of a part at most {most:g}, which rounds to 0")
            self._chosen[0] = np.arange(1)  # of the items that were not drawn some may come up
        self._ends = np.cumsum([len(indices) for indices in self._chosen])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _at(self, places: Sequence[int]) -> list[Item]:
        items = []
        for place in places:
            part = int(np.searchsorted(self._ends, place, side="right"))
            indices = self._chosen[part]
            items.append(self._parts[part][int(indices[place - self._ends[part]])])  # a negative index, from the part's end
        return items
