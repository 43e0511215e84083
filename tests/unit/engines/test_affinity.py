"""Conversations stay where their prefix is cached, as long as the data-parallel ranks of an engine are evenly busy."""

import random
from itertools import pairwise

import numpy as np
import pytest

from megarl.batch import Sample
from megarl.config import EvalConfig, TrainConfig, load
from megarl.driver.engines import affinity
from megarl.engines.affinity import Homes
from megarl.engines.episodes import Prefill, prefill
from megarl.response import EpisodeSummary, Response
from megarl.step.metrics import environment_metrics
from tests.unit.checkpoints.test_may_differ import EXAMPLE

AGENT = "environment={source: {type: agent, function: 'examples.agents.loop:solve'}}"


def test_conversations_are_spread_and_stay() -> None:
    """Also while all of them are with their tools, so that no rank has a request."""
    homes = Homes(3, slack=2)
    first = [homes.place(name, [0, 0, 0]) for name in range(9)]
    assert [first.count(rank) for rank in range(3)] == [3, 3, 3]
    for _ in range(4):
        assert [homes.place(name, [0, 0, 0]) for name in range(9)] == first
    assert homes.place(None, [4, 1, 2]) == 1
    homes.forget()
    assert [homes.place(name, [0, 0, 0]) for name in (8, 7, 6)] == [0, 1, 2]


def test_a_rank_is_never_busier_than_another_by_more_than_the_slack_and_one() -> None:
    draw = random.Random(5)
    for ranks, slack in ((2, 1), (4, 3), (8, 16)):
        homes, loads, moved = Homes(ranks, slack), [0] * ranks, 0
        homed: dict[int, int] = {}
        unfinished: list[int] = []
        for _ in range(4000):
            if unfinished and draw.random() < 0.45:
                loads[unfinished.pop(draw.randrange(len(unfinished)))] -= 1
                continue
            name = draw.randrange(40)
            before, rank = list(loads), homes.place(name, loads)
            assert before[rank] - min(before) <= slack
            moved += name in homed and homed[name] != rank
            if name in homed and before[homed[name]] - min(before) <= slack:
                assert rank == homed[name], "its prefix is there, and there is room"
            homed[name] = rank
            loads[rank] += 1
            unfinished.append(rank)
        assert moved or slack == 16


def turn(prompt: int, length: int, cached: int) -> Sample:
    return Sample(np.zeros(prompt + length, np.int32), prompt, np.zeros(length, np.float32), "stop", cached_tokens=cached)


def test_what_was_computed_again_is_what_an_earlier_turn_had_computed() -> None:
    """The last token of a turn is sampled and never fed, so the next turn has to compute it in any case."""
    going_on = [turn(10, 5, 4), turn(20, 5, 12), turn(40, 5, 24)]
    assert all(len(before.tokens) <= after.prompt_length for before, after in pairwise(going_on))
    assert prefill([going_on, [turn(30, 5, 8)]]) == Prefill(10 + 20 + 40 + 30, 4 + 12 + 24 + 8, (14 - 12) + (24 - 24))
    seen = [Response(0, "", 10, 9, 5, True, None, 0, episode=EpisodeSummary(0.0, 4, None, {}, "", "", False, 100, 48, 2))]
    metrics = environment_metrics(seen)
    assert metrics["environment/prefix_cache_hit_rate"].value() == 0.48 and metrics["environment/recomputed_tokens/mean"].value() == 0.5


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), False),
        ((AGENT,), True),
        ((AGENT, "rollout.request_routing=deterministic"), False),
        ((AGENT, "cluster.deterministic=true"), False),
        ((AGENT, "cluster.deterministic=true", "rollout.request_routing=affinity"), True),
        (("environment={source: {type: textarena, id: GuessTheNumber-v0}}",), False),
        (("rollout.request_routing=affinity",), True),
    ],
)
def test_agents_have_it_unless_the_run_is_to_be_deterministic(overrides: tuple[str, ...], expected: bool) -> None:
    config = load(EXAMPLE, list(overrides), TrainConfig)
    assert affinity(config, config.rollout) is expected
    evaluated = load(EXAMPLE.with_name("eval.yaml"), [one for one in overrides if one.startswith("rollout")], EvalConfig)
    assert affinity(evaluated, evaluated.rollout) is ("rollout.request_routing=affinity" in overrides)
