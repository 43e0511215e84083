"""Whose turn it is on shared devices, as the calls to engines and ranks tell it."""

from typing import Any, cast

from megarl.cluster.actor_group import ActorGroup
from megarl.driver.device_turns import Turns


class Told:
    """Stands for actors, and notes what they are asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def call(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        self.calls.append((method, *arguments[:1]))
        return []


def test_an_engine_that_starts_beside_sleeping_ones_leaves_the_devices_too() -> None:
    engines = Told()
    turns = Turns(cast(ActorGroup, engines), 5.0)
    turns.to_ranks()
    turns.join(None)
    turns.make_room()
    turns.admit()
    turns.to_ranks(keep_weights=False)
    assert engines.calls == [("sleep", True), ("sleep", False)]


def test_engines_that_have_started_anew_leave_the_devices_to_ranks_that_start() -> None:
    """The ranks had the devices when they failed: the engines of before were asleep, and those that come instead are awake."""
    engines, ranks = Told(), Told()
    turns = Turns(cast(ActorGroup, engines), 5.0)
    turns.join(cast(ActorGroup, ranks))
    turns.to_ranks()
    turns.to_ranks()
    assert engines.calls == [("sleep", True)]
    turns.join(None)
    turns.to_ranks(keep_weights=False)
    assert engines.calls == [("sleep", True)], "those that have not started anew are asleep"
    turns.begin_again()
    turns.to_ranks(keep_weights=False)
    assert engines.calls == [("sleep", True), ("sleep", False)] and ranks.calls == []
