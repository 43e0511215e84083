"""Which prompts come next: shuffled epochs that stop and go on exactly anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np


class Sampler:
    """Draws indices 0..count-1, epoch after epoch; each epoch is a permutation that depends on (seed, epoch) alone."""

    def __init__(self, count: int, seed: int, shuffle: bool) -> None:
        """ValueError where there is nothing to draw from."""
        if count < 1:
            raise ValueError("a sampler needs at least one prompt")
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._start(0, 0)

    def take(self, k: int) -> list[int]:
        """The next `k` indices. A call that reaches the end of an epoch goes on with the next one."""
        taken: list[int] = []
        while len(taken) < k:
            if self._position == self.count:
                self._start(self._epoch + 1, 0)
            part = self._order[self._position : self._position + k - len(taken)].tolist()
            self._position += len(part)
            taken += part
        return taken

    def state(self) -> dict[str, Any]:
        """Where the sampler stands, as plain values for JSON."""
        return {"count": self.count, "seed": self.seed, "shuffle": self.shuffle, "epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. ValueError where it was saved over other data or another order."""
        for name, value in (("count", self.count), ("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != value:
                raise ValueError(f"the sampler was saved with {name}={state[name]}, and this run has {name}={value}")
        self._start(state["epoch"], state["position"])

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = np.random.default_rng([self.seed, epoch]).permutation(self.count) if self.shuffle else np.arange(self.count)
