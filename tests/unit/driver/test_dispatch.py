"""Prompts go to the engine that has least to do, and from one that is lost to the others. No Ray: its calls are numbers."""

from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError

from megarl.cluster.actor_group import ActorGroup, WorkerDied
from megarl.config import EnvironmentSettings, HttpEnvironment, PromptFormat, RolloutSettings
from megarl.driver import dispatch
from megarl.driver.dispatch import Dispatcher, NoEngine, Wanted
from megarl.engines.episodes import Limits, Start
from megarl.engines.generate import Sampling
from megarl.engines.worker import Playing


class Calls:
    """Stands in for Ray. Engines are strings; `done` says what has become of a call."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []  # engine, number of the prompt
        self.done: dict[int, Any] = {}

    def ask(self, engine: str, share: Sequence[Start], *_: Any) -> list[int]:
        self.asked.append((engine, int(share[0].id)))
        return [len(self.asked) - 1]

    def wait(self, references: list[int], num_returns: int = 1, timeout: float = 0) -> tuple[list[int], list[int]]:
        ready = [one for one in references if one in self.done][:num_returns]
        return ready, [one for one in references if one not in ready]

    def get(self, reference: int) -> list[Any]:
        result = self.done[reference]
        if isinstance(result, Exception):
            raise result
        return [result]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(dispatch, "ray", found)
    monkeypatch.setattr(dispatch, "ask", found.ask)
    monkeypatch.setattr(dispatch, "answered", lambda responses, *_: responses)
    return found


def dispatcher(prompts: int, max_num_seqs: int, n: int = 4, playing: Playing | None = None) -> Dispatcher:
    work = Dispatcher(ActorGroup("engine", ["a", "b"]), RolloutSettings(max_num_seqs=max_num_seqs), playing)
    for number in range(prompts):
        work.ask(Wanted(number, Start(number, [1], 0), Sampling(n, 1.0, 8, 0)))
    return work


def test_who_has_finished_something_is_asked_next_and_nobody_for_more_than_twice_what_it_works_on(calls: Calls) -> None:
    work = dispatcher(8, max_num_seqs=6)
    assert work.finished() == {} and calls.asked == [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("a", 4), ("b", 5)]
    calls.done = {3: "three", 5: "five"}
    assert work.finished() == {3: ["three"], 5: ["five"]} and work.open == 6
    work.finished()
    assert calls.asked[6:] == [("b", 6), ("b", 7)]


def test_an_engine_is_not_asked_for_many_more_episodes_than_its_environment_bears(calls: Calls) -> None:
    """Those that wait there would use up the time of their call."""
    environment = EnvironmentSettings(source=HttpEnvironment(url="http://127.0.0.1:1"), max_concurrent=2)
    work = dispatcher(8, max_num_seqs=6, playing=Playing(environment, Limits(8, 8, 2), PromptFormat()))
    work.finished()
    assert calls.asked == [("a", 0), ("b", 1)]


def test_what_a_lost_engine_had_to_do_another_does_first_and_in_order(calls: Calls) -> None:
    work = dispatcher(7, max_num_seqs=6)
    work.finished()
    calls.done = {0: "zero", 2: ActorDiedError()}
    found = work.finished()
    assert found == {0: ["zero"]} and list(work.lost) == [0] and isinstance(work.lost[0], WorkerDied)
    calls.done |= {1: "one", 3: "three"}
    assert work.finished() == {1: ["one"], 3: ["three"]}
    work.finished()
    assert calls.asked[6:] == [("b", 2), ("b", 4)], "4 before 6, which had to wait from the beginning"
    work._group.actors[0] = "another"
    work.finished()
    assert calls.asked[8:] == [("another", 6)] and work.lost == {}


def test_the_late_death_of_an_engine_is_not_that_of_the_one_in_its_place(calls: Calls) -> None:
    """Somebody else has seen it first, and has replaced it before its calls fail here."""
    work = dispatcher(4, max_num_seqs=6)
    work.finished()
    work._group.actors[0] = "another"
    work.ask(Wanted(4, Start(4, [1], 0), Sampling(4, 1.0, 8, 0)))
    work.finished()
    assert calls.asked[4:] == [("another", 4)], "which has nothing to do yet"
    calls.done = {0: ActorDiedError()}
    assert work.finished() == {} and work.lost == {}
    work.finished()
    assert calls.asked[5:] == [("another", 0), ("another", 2)], "what the other one had; 4 is asked for once"


def test_an_engine_that_starts_in_the_place_of_another_is_not_asked_before_it_is_ready(calls: Calls) -> None:
    work, starting = dispatcher(2, max_num_seqs=6), {0, 1}
    work._starting = starting
    assert work.finished() == {} and calls.asked == [] and work.open == 2, "it is waited for; none is lost"
    starting.remove(1)
    work.finished()
    assert calls.asked == [("b", 0), ("b", 1)]


def test_without_engines_and_for_faults_that_any_engine_would_have_it_ends(calls: Calls) -> None:
    work = dispatcher(2, max_num_seqs=6)
    work.finished()
    calls.done = {0: ActorDiedError(), 1: ActorDiedError()}
    assert work.finished() == {}
    with pytest.raises(NoEngine):
        work.finished()
    work = dispatcher(1, max_num_seqs=6)
    work.finished()
    calls.done = {2: RayError("no experts")}
    with pytest.raises(RayError, match="no experts"):
        work.finished()
