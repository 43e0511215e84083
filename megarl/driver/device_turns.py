"""Turn-taking of engines and ranks that share devices: while one side works, the other has vacated them."""

from collections.abc import Callable

from megarl.cluster.actor_group import ActorGroup


class Turns:
    """Keeps track of whose turn it is. The side that is about to work takes the devices first; no other call is needed.

    The engines have the first turn. Parked ranks return to the devices model by model, as the models are used.

    Args:
        engines: the engines' actors.
        timeout_s: time limit for leaving the devices and for returning to them.

    Attributes:
        guard: runs an operation on the engines; if an engine is lost, replaces it and tries again.
    """

    def __init__(self, engines: ActorGroup, timeout_s: float) -> None:
        self._engines, self._timeout_s = engines, timeout_s
        self._ranks: ActorGroup | None = None  # the ranks on the engines' devices, once there are any
        self._asleep: list[str] = []  # what the engines have moved off the devices or discarded
        self.guard: Callable[[str, Callable[[], object]], object] = lambda _, work: work()

    def join(self, ranks: ActorGroup | None) -> None:
        """Register the ranks, whose turn it is now; None: the ranks are gone."""
        self._ranks = ranks

    def begin_again(self) -> None:
        """Record that all engines have been restarted and are awake."""
        self._asleep = []

    def to_ranks(self, *, keep_weights: bool = True) -> None:
        """Make the engines leave the devices. If they do not keep their weights, `sync` must follow before they can answer again."""
        if not self._asleep:
            self.guard("sleep", lambda: self._leave(keep_weights))

    def wake_weights(self) -> None:
        """Give the engines room on the devices for new weights, beside the policy's."""
        self.to_ranks(keep_weights=False)
        if self._ranks is not None:
            self._ranks.call("leave_policy", timeout_s=self._timeout_s)
        self._wake("weights")

    def to_engines(self) -> None:
        """Make the ranks leave the devices, so that the engines can answer."""
        self.guard("wake", self._to_engines)

    def make_room(self) -> None:
        """Make the ranks leave the devices for an engine that starts awake."""
        if self._ranks is not None:
            self._ranks.call("park", timeout_s=self._timeout_s)

    def admit(self) -> None:
        """Admit an engine that has replaced another: if it is the ranks' turn, make it leave the devices, too."""
        if self._asleep:
            self._sleep(keep_weights=False)

    def _leave(self, keep_weights: bool) -> None:
        if not self._asleep:  # otherwise an engine was replaced meanwhile, and only the weights are awake, in all of them
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
