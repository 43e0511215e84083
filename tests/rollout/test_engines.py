"""What is on top of an engine works with any: here with one that is no vLLM."""

from __future__ import annotations

import asyncio

import pytest

from megarl.config import ConfigError, RolloutSettings
from megarl.rollout import registry
from megarl.rollout.engine import RolloutTimeout
from megarl.rollout.generate import Sampling, TokenPrompt, generate
from tests.rollout.backwards_engine import PLACE, STUCK, BackwardsEngine, BackwardsSettings

SAMPLING = Sampling(n=2, temperature=1.0, max_tokens=8, seed=1)


def test_responses_come_in_the_order_of_the_prompts_whenever_they_finish() -> None:
    prompts = [TokenPrompt("long", [5, 6, 7, 8]), TokenPrompt("short", [9]), TokenPrompt(2, [10, 11])]
    answers = asyncio.run(generate(BackwardsEngine("engine 0"), prompts, SAMPLING, 1.0))
    assert [answer.prompt_id for answer in answers] == ["long", "short", 2]
    said = [[sample.tokens[sample.prompt_length :].tolist() for sample in answer.samples] for answer in answers]
    assert said == [[[8, 7, 6, 5]] * 2, [[9]] * 2, [[11, 10]] * 2]


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    engine = BackwardsEngine("engine 0")
    with pytest.raises(RolloutTimeout, match=r"^engine 0: 2 of 4 responses not done after 1 s$"):
        asyncio.run(generate(engine, [TokenPrompt(0, [5, 6]), TokenPrompt(1, [STUCK, 6])], SAMPLING, 1.0))
    assert engine.open == {}


def test_the_registry_gives_the_engine_that_the_configuration_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, "backwards", PLACE)
    settings = RolloutSettings(tp=2)
    with pytest.raises(ConfigError, match=r"^rollout\.kv_cache_mb: a CPU engine needs it$"):
        registry.check_engine({"num_attention_heads": 4}, "float32", settings, gpu=False)
    with pytest.raises(ConfigError, match=r"^rollout\.tp=2: the engine has one worker$"):
        registry.check_engine({}, "float32", settings.model_copy(update={"engine": BackwardsSettings()}), gpu=False)
