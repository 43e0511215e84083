"""Engines that are lost, and those that start in their places. No Ray: an engine is a name, and a call what becomes of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from megarl.cluster import actor_group
from megarl.cluster.actor_group import ActorGroup, WorkerDied
from megarl.cluster.server import ProcessStalled
from megarl.config import RolloutSettings, TrainConfig, load
from megarl.driver.engines import Engines, EngineStarter
from tests.e2e.job import RL


class Calls:
    """Stands in for Ray: each reference is an engine, of which those that are `dead` are gone."""

    def __init__(self) -> None:
        self.dead = set[str]()

    def wait(self, references: list[str], num_returns: int = 1, timeout: float = 0) -> tuple[list[str], list[str]]:
        return references[:num_returns], references[num_returns:]

    def get(self, reference: str) -> None:
        if reference in self.dead:
            raise ActorDiedError()

    def cancel(self, reference: str) -> None: ...

    def kill(self, actor: Any) -> None: ...


class Starter(EngineStarter):
    """Its engines are names."""

    def create(self, index: int) -> Any:
        return engine(f"another {index}")

    def open(self, index: int, actor: Any) -> Any:
        return actor.ping.remote(1.0)


def engine(name: str) -> Any:
    return SimpleNamespace(ping=SimpleNamespace(remote=lambda _: name))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    stand_in = Calls()
    monkeypatch.setattr(actor_group, "ray", stand_in)
    return stand_in


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model=tmp_path))
    config = load(tmp_path / "job.yaml", [], TrainConfig)
    starter = Starter(config, RolloutSettings(), [None] * 4, tmp_path)
    return Engines(ActorGroup("engine", [engine(str(index)) for index in range(4)]), RolloutSettings(), None, starter)


def test_an_engine_is_lost_that_answers_while_what_it_has_started_is_stopped(
    calls: Calls, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else whoever needs that process waits for it, and another would be blamed."""
    stopped = ProcessStalled("recovery: engine 0: a helper (pid 7) has been stopped by a signal for 3 s")
    monkeypatch.setattr(actor_group.watch, "still", lambda *_: {0: stopped})
    assert engines.start_lost() == {0: "another 0"}


def test_an_engine_that_does_not_start_in_the_place_of_another_has_its_number(calls: Calls, engines: Engines) -> None:
    calls.dead = {"2"}
    opening = engines.start_lost()
    assert opening == {2: "another 2"} and engines.starting == {2}
    engines.ready(opening)
    calls.dead = {"another 2"}
    with pytest.raises(WorkerDied, match="^start: engine 2 died"):
        engines.ready(opening)
