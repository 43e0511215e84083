"""Engines and ranks that share devices take turns: who does not work has left them."""

from __future__ import annotations

from megarl.cluster.actor_group import ActorGroup


class Turns:
    """Whose turn it is. Whoever is asked to work takes the devices first; nothing else is to be called for it.

    The engines have the first turn. Ranks that are parked come back model by model, as they are used.

    Args:
        engines: their actors.
        timeout_s: longest time in which they leave the devices or come back.
    """

    def __init__(self, engines: ActorGroup, timeout_s: float) -> None:
        self._engines, self._timeout_s = engines, timeout_s
        self._ranks: ActorGroup | None = None  # those that share the engines' devices, once there are any
        self._asleep: list[str] = []  # what the engines hold elsewhere, or not at all

    def join(self, ranks: ActorGroup) -> None:
        """The ranks are there, and have their turn."""
        self._ranks = ranks

    def to_ranks(self, *, keep_weights: bool = True) -> None:
        """The engines leave the devices. Where they do not keep their weights, `sync` must follow before they can answer again."""
        if not self._asleep:
            self._engines.call("sleep", keep_weights, self._timeout_s, timeout_s=self._timeout_s)
            self._asleep = ["weights", "kv_cache"]

    def wake_weights(self) -> None:
        """The engines have room for new weights, beside the ranks."""
        self.to_ranks(keep_weights=False)
        self._wake("weights")

    def to_engines(self) -> None:
        """The ranks leave the devices, and the engines can answer."""
        if self._asleep and self._ranks is not None:
            self._ranks.call("park", timeout_s=self._timeout_s)
        for part in tuple(self._asleep):
            self._wake(part)

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._engines.call("wake", part, self._timeout_s, timeout_s=self._timeout_s)
            self._asleep.remove(part)
