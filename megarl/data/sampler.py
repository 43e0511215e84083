"""The order in which prompts are drawn: shuffled epochs that can be stopped and resumed exactly at any point."""

from typing import Any

import numpy as np


class Sampler:
    """Draw indices 0..count-1, epoch after epoch; each epoch is a permutation that depends only on (seed, epoch)."""

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        """Start at the first epoch. Raise ValueError if there is nothing to draw from."""
        if count < 1:
            raise ValueError("a sampler needs at least one prompt")
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._start(0, 0)

    def take(self, k: int) -> list[int]:
        """Return the next `k` indices, continuing with the next epoch if this one ends."""
        indices: list[int] = []
        while len(indices) < k:
            if self._position == self.count:
                self._start(self._epoch + 1, 0)
            part = self._order[self._position : self._position + k - len(indices)].tolist()
            self._position += len(part)
            indices += part
        return indices

    def state(self) -> dict[str, Any]:
        """Return the sampler's position as plain JSON values."""
        return {"count": self.count, "seed": self.seed, "shuffle": self.shuffle, "epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raise ValueError if it was saved with a different count, seed or shuffling."""
        for name, value in (("count", self.count), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != value:
                raise ValueError(f"the sampler was saved with {name}={state[name]}, and this run has {name}={value}")
        self._start(state["epoch"], state["position"])

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = np.random.default_rng([self.seed, epoch]).permutation(self.count) if self.shuffle else np.arange(self.count)
