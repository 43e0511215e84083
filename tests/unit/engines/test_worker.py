"""What an engine reports is checked before it is kept, and what is kept of a response that is cut travels once."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.batch import Sample, VersionSpan
from megarl.config import RoutingSettings
from megarl.engines.engine import Request, RolloutError
from megarl.engines.episodes import Start
from megarl.engines.generate import Sampling
from megarl.engines.parts import added, whole
from megarl.engines.worker import ExpertsWanted, RolloutWorker, answered
from megarl.response import Response
from tests.engines.backwards_engine import PLACE

NOWHERE = Path(os.devnull)  # no run's directory


@pytest.mark.parametrize("shape", [(4, 4, 2), (5, 3, 2), (5, 4, 3)], ids=["tokens", "layers", "experts a token"])
def test_experts_of_another_shape_are_refused(shape: tuple[int, int, int]) -> None:
    worker, wanted = RolloutWorker("engine 0", PLACE, {}, NOWHERE), ExpertsWanted([[0, 1], [2, 3]], layers=4, topk=2, share=1.0)
    sample = Sample(np.zeros(6, np.int32), 2, np.zeros(4, np.float32), "stop", routed_experts=np.zeros(shape, np.uint8))
    with pytest.raises(RolloutError, match=rf"^engine 0: reports routed experts \[{shape[0]}, {shape[1]}, {shape[2]}\], .* \[5, 4, 2\]$"):
        worker._kept(sample, wanted)


@pytest.mark.parametrize("share", [1e-9, 0.001, 0.01, 0.07, 1 / 3, 0.4, 0.5, 0.7, 0.99, 1.0])
def test_the_share_of_the_responses_that_is_configured_is_reported(share: float) -> None:
    """To one response, however many there are, always the same ones, spread over the call, and never none."""
    wanted = ExpertsWanted([[0]], layers=1, topk=1, share=share)
    chosen = [number for number in range(5000) if wanted.of(number)]
    assert chosen[0] == 0 and chosen == [number for number in range(5000) if wanted.of(number)]
    for count in (1, 2, 8, 99, 100, 101, 1024, 5000):
        assert 0 <= sum(number < count for number in chosen) - share * count < 1
    assert {later - one for one, later in pairwise(chosen)} <= {int(1 / share), int(1 / share) + 1}
    settings = RoutingSettings(sample=share)
    assert settings.reported == share and RoutingSettings(sample=share, replay="r3").reported == 1.0


def test_of_a_call_the_engine_keeps_the_experts_of_that_share() -> None:
    """With the default, one response in a hundred: of three groups of eight one, of fourteen two, always in the same place."""
    loose: Any = RolloutWorker("engine 0", PLACE, {}, NOWHERE)
    loose._responder, loose._tokenizer, loose._ends, loose._timeout_s = Counting(), Words(), (), 1.0
    wanted = ExpertsWanted([[0, 2], [1]], layers=3, topk=2, share=RoutingSettings().sample)
    for prompts, expected in ((3, [0]), (14, [0, 100])):
        starts = [Start(n, PROMPT, 0) for n in range(prompts)]
        responses, *values = asyncio.run(loose.respond(starts, Sampling(8, 1.0, 64, 0), wanted))
        kept = [response for response in answered(responses, values, wanted) if response.experts is not None]
        assert [8 * response.prompt + response.index for response in kept] == expected
        assert sum(value is not None for value in values) == 8 * prompts + 2 * len(expected), "nothing is kept of the others"


LENGTH, PROMPT = 23, [7, 8, 9]
WANTED = ExpertsWanted([[0, 2], [1]], layers=3, topk=2, share=0.5)


class Counting:
    """Responds to everything with 0, 1, 2, ... as far as LENGTH, from new weights each time; row t of the experts is t."""

    def __init__(self) -> None:
        self.version, self.rows = 0, list[int]()

    async def all(self, requests: Sequence[Request], timeout_s: float) -> list[Sample]:
        self.version += 1
        return [self.one(request) for request in requests]

    def one(self, request: Request) -> Sample:
        begun = len(request.tokens) - len(PROMPT)
        new = np.arange(begun, min(LENGTH, begun + request.max_tokens), dtype=np.int32)
        tokens = np.concatenate([np.array(request.tokens, np.int32), new])
        rows = np.arange(request.experts_from, len(tokens) - 1, dtype=np.uint8)
        self.rows.append(len(rows))
        reason = "stop" if begun + len(new) == LENGTH else "length"
        experts = np.broadcast_to(rows[:, None, None], (len(rows), 3, 2))
        return Sample(tokens, len(request.tokens), -new.astype(np.float32), reason, (VersionSpan(0, self.version),), experts)


class Words:
    eos_token_id = 0

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join(map(str, tokens))


def test_a_response_that_is_cut_travels_once_however_often_it_is_cut() -> None:
    """Its tokens and log-probs once as a part and once as a whole, its experts once, and its text once, however many rounds it takes."""
    worker, engine = RolloutWorker("engine 0", PLACE, {}, NOWHERE), Counting()
    loose: Any = worker
    loose._responder, loose._tokenizer, loose._ends, loose._timeout_s = engine, Words(), (), 1.0
    sampling, budget = Sampling(2, 1.0, 64, 0), 4
    parts: list[list[Sample]] = [[], []]
    experts: list[Sequence[Any]] = []
    rounds: list[list[Response]] = []
    while not rounds or not rounds[-1][0].finished:
        given = [part for response in parts for part in response]
        call = worker.go_on(Start(0, PROMPT, 0), sampling, WANTED, budget, {index: len(parts[index]) for index in (0, 1)}, *given)
        responses, *values = asyncio.run(call)
        rounds.append(answered(responses, values, WANTED))
        for index, response in enumerate(rounds[-1]):
            parts[index].append(response.payload)
        assert rounds[-1][0].experts is not None and rounds[-1][1].experts is None, "of one response in two"
        experts += rounds[-1][0].experts
    assert [one[0].length for one in rounds] == [4, 8, 12, 16, 20, 23] and [one[0].text for one in rounds[:-1]] == [""] * 5
    assert [len(part.tokens) for part in parts[0]] == [len(PROMPT) + 4, 4, 4, 4, 4, len(PROMPT) + LENGTH]
    assert engine.rows[::2] == [len(part[0]) for part in experts] == [len(PROMPT) + 3, 4, 4, 4, 4, 3]
    done, uncut = parts[0][-1], engine.one(Request(0, PROMPT, 64, 1.0, 0))
    assert np.array_equal(done.tokens, uncut.tokens) and np.array_equal(done.rollout_logp, uncut.rollout_logp)
    assert done.routed_experts is None and done.weight_versions == tuple(VersionSpan(4 * n, n + 1) for n in range(6))
    assert rounds[-1][0].text == " ".join(str(token) for token in range(LENGTH - 1)), "the last token ended it"
    for stage, layers in enumerate(WANTED.stages):
        rows = np.concatenate([part[stage] for part in experts])
        assert rows.shape == (len(PROMPT) + LENGTH - 1, len(layers), 2) and (rows == np.arange(len(rows))[:, None, None]).all()


def test_parts_of_one_version_are_one_span() -> None:
    first = Sample(np.arange(5, dtype=np.int32), 3, np.zeros(2, np.float32), "length", (VersionSpan(0, 4),))
    second = replace(first, tokens=np.arange(9, dtype=np.int32), prompt_length=5, rollout_logp=np.ones(4, np.float32))
    third = replace(second, weight_versions=(VersionSpan(0, 4), VersionSpan(1, 5)), finish_reason="stop")
    both = whole([first, added(second), added(third)])
    assert both.weight_versions == (VersionSpan(0, 4), VersionSpan(7, 5)) and both.finish_reason == "stop"
    assert both.prompt_length == 3 and both.tokens.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8]
