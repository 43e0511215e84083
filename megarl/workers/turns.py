"""Engines and ranks that share devices take turns: the idle side has vacated them."""

from __future__ import annotations

from collections.abc import Callable

from megarl.cluster.actor_group import ActorGroup


class Turns:
    """Whose turn it is. Whoever is asked to work takes the devices first; nothing else is to be called for it.

    The engines have the first turn. Ranks that are parked come back model by model, as they are used.

    Args:
        engines: their actors.
        timeout_s: longest time in which they leave the devices or come back.

    Attributes:
        guard: runs an operation on the engines, replacing any that is lost and trying again.
    """

    def __init__(self, engines: ActorGroup, timeout_s: float) -> None:
        self._engines, self._timeout_s = engines, timeout_s
        self._ranks: ActorGroup | None = None  # those that share the engines' devices, once there are any
        self._asleep: list[str] = []  # what the engines hold elsewhere, or not at all
        self.guard: Callable[[str, Callable[[], object]], object] = lambda _, work: work()

    def join(self, ranks: ActorGroup | None) -> None:
        """The ranks are there, and have their turn; None: they are gone."""
        self._ranks = ranks

    def begin_again(self) -> None:
        """All engines have started anew, awake."""
        self._asleep = []

    def to_ranks(self, *, keep_weights: bool = True) -> None:
        """The engines leave the devices. Where they do not keep their weights, `sync` must follow before they can answer again."""
        if not self._asleep:
            self.guard("sleep", lambda: self._leave(keep_weights))

    def wake_weights(self) -> None:
        """The engines have room for new weights, beside the ranks."""
        self.to_ranks(keep_weights=False)
        self._wake("weights")

    def to_engines(self) -> None:
        """The ranks leave the devices, and the engines can answer."""
        self.guard("wake", self._to_engines)

    def make_room(self) -> None:
        """The ranks leave the devices: an engine starts, awake."""
        if self._ranks is not None:
            self._ranks.call("park", timeout_s=self._timeout_s)

    def admit(self) -> None:
        """An engine has started in the place of another: where it is the ranks' turn, it leaves the devices, too."""
        if self._asleep:
            self._sleep(keep_weights=False)

    def _leave(self, keep_weights: bool) -> None:
        if not self._asleep:  # else one was replaced meanwhile, and only the weights of all are awake
            self._sleep(keep_weights)

    def _sleep(self, keep_weights: bool) -> None:
        self._engines.call("sleep", keep_weights, self._timeout_s, timeout_s=self._timeout_s)
        self._asleep = ["weights", "kv_cache"]

    def _to_engines(self) -> None:
        if self._asleep:
            self.make_room()
        for part in tuple(self._asleep):
            self._wake(part)

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._engines.call("wake", part, self._timeout_s, timeout_s=self._timeout_s)
            self._asleep.remove(part)
