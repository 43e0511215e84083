"""The RL loop's parts with another engine than vLLM: the actors, the placement, the responses, the new weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.exceptions import RayError

from megarl.batch import VersionSpan
from megarl.checks.train import check_train
from megarl.cluster.actor_group import WorkerLate
from megarl.config import RoutingSettings, TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.driver.engines import start_engines
from megarl.engines.engine import RolloutError
from megarl.engines.generate import Sampling
from megarl.engines.registry import ENGINES
from megarl.observe.restarts import Restart, Restarts
from tests.e2e.job import Job
from tests.e2e.lab import Lab
from tests.engines.backwards_engine import PLACE, STUCK, BackwardsSettings


def test_an_engine_of_another_type_generates_and_receives_weights(
    lab: Lab, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "backwards", PLACE)
    config = load(Job(tmp_path, tiny_model).write(), [], TrainConfig)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": BackwardsSettings()})})
    prompts = check_train(config.model_copy(update={"routing": RoutingSettings(sample=0.0)})).train[:5]
    tokenizer = load_tokenizer(tiny_model)
    with lab.workers(config) as (models, _):
        engines = start_engines(config)
        models.sync(engines, 1)  # compares the fingerprints of what it has sent with those of what came
        responses = engines.generate(prompts, Sampling(2, 1.0, 64, 0))
        samples = [ray.get(response.payload) for response in responses]
        with pytest.raises(RolloutError, match=r"^engine 0: reports no routed experts; routing.sample=0 asks for none"):
            engines.generate(prompts, Sampling(2, 1.0, 64, 0), models.experts)
        ray.kill(engines.group.actors[0])
    assert [response.text for response in responses] == [
        decode(tokenizer, prompt.tokens[::-1], finished=True) for prompt in prompts for _ in range(2)
    ]
    assert {sample.weight_versions for sample in samples} == {(VersionSpan(0, 1),)}


@pytest.fixture
def two(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A run with two of these engines."""
    monkeypatch.setitem(ENGINES, "backwards", PLACE)
    config = load(Job(tmp_path, tiny_model).write(), ["rollout.replicas=2", "routing.sample=0"], TrainConfig)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": BackwardsSettings()})})


def test_an_engine_that_dies_is_replaced_and_another_gives_its_responses(lab: Lab, two: TrainConfig) -> None:
    """In a rollout or in a sync: the answers are those of engines that nothing happened to, of the new weights."""
    prompts, sampling = check_train(two).train[:5], Sampling(2, 1.0, 64, 0)
    told, notes = list[Restart](), list[str]()
    with lab.workers(two) as (models, _):
        engines = start_engines(two, Restarts(2, told.append, notes.append))
        models.sync(engines, 1)
        straight = engines.generate(prompts, sampling)
        first = list(engines.group.actors)

        ray.kill(first[1])  # noticed by the prompts
        again = engines.generate(prompts, sampling)
        assert engines.group.actors[0] is first[0] and engines.group.actors[1] is not first[1]
        assert [replace(one, payload=None) for one in again] == [replace(one, payload=None) for one in straight]
        for one, other in zip(straight, again, strict=True):  # what it had answered before it died is there, too
            assert np.array_equal(ray.get(one.payload).tokens, ray.get(other.payload).tokens)
        samples = [ray.get(response.payload) for response in again]
        assert {sample.weight_versions for sample in samples} == {(VersionSpan(0, 1),)}

        ray.kill(first[0])  # noticed by the weights
        models.sync(engines, 2)
        assert engines.group.actors[0] is not first[0]
        assert {ray.get(response.payload).weight_versions for response in engines.generate(prompts, sampling)} == {(VersionSpan(0, 2),)}
        for actor in engines.group.actors:
            ray.kill(actor)
    assert [one.kind for one in told] == ["engine"] * 2 and all(one.recovery_s > 0 for one in told)
    assert [one.fault.partition(" (")[0] for one in told] == ["generate: engine 1 died", "sync: engine 0 died"]


def test_engines_that_are_lost_beside_the_ranks_are_a_part_of_their_restart(lab: Lab, two: TrainConfig) -> None:
    prompts, sampling = check_train(two).train[:5], Sampling(2, 1.0, 64, 0)
    with lab.workers(two) as (models, _):
        engines = start_engines(two, Restarts(0, lambda _: None, lambda _: None))  # none is allowed
        models.sync(engines, 1)
        straight, first = engines.generate(prompts, sampling), list(engines.group.actors)
        assert engines.start_lost() == {}
        ray.kill(first[1])
        with pytest.raises(RayError):  # for a moment it may still answer
            while True:
                ray.get(first[1].ping.remote(60.0), timeout=60)
        opening = engines.start_lost()
        engines.ready(opening)
        assert [*opening] == [1] and engines.group.actors[0] is first[0] and engines.group.actors[1] is not first[1]
        models.sync(engines, 1)
        assert [one.text for one in engines.generate(prompts, sampling)] == [one.text for one in straight]
        for actor in engines.group.actors:
            ray.kill(actor)


@pytest.mark.long
def test_late_engines_are_replaced_as_often_as_restarts_allow(lab: Lab, two: TrainConfig) -> None:
    told, notes = list[Restart](), list[str]()
    late = two.model_copy(update={"rollout": two.rollout.model_copy(update={"timeout_s": 3.0})})
    with lab.workers(two) as (models, _):
        engines = start_engines(late, Restarts(1, told.append, notes.append))
        models.sync(engines, 1)
        first = list(engines.group.actors)
        with pytest.raises(WorkerLate, match=r"^generate: no answer within 3 s from engine 0"):  # of both, and of those in their places
            engines.generate([Prompt(0, "", [STUCK], "", {})], Sampling(2, 1.0, 64, 0))
        assert engines.group.actors[0] is not first[0] and engines.group.actors[1] is not first[1]
        for actor in engines.group.actors:
            ray.kill(actor)
    assert [one.fault for one in told] == ["generate: no answer within 3 s from engine 0"]
    assert notes[-1] == "1 restarts within a day are the most that cluster.restarts=1 allows"
