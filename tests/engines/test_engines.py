"""What is on top of an engine works with any: here with one that is no vLLM."""

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.checks.routing import check_reported_experts
from megarl.checks.train import check_offered
from megarl.config import ConfigError, RolloutSettings, RoutingSettings, TrainConfig, load
from megarl.engines import registry
from megarl.engines.engine import Engine, EngineDead, Finished, Request, RolloutTimeout, Setup
from megarl.engines.generate import Sampling, TokenPrompt, generate
from megarl.engines.responder import Responder
from megarl.engines.vllm.engine import VllmEngine
from megarl.models.description import ModelDescription
from megarl.sync.fingerprint import compare
from tests.e2e.job import Job
from tests.engines.backwards_engine import PLACE, STUCK, BackwardsEngine, BackwardsSettings
from tests.engines.engine_host import Host
from tests.engines.test_families import stored
from tests.engines.transformers_reference import TIMEOUT_S, Trainer
from tests.published_models import MODELS, description_of
from tests.rows import rows

SETTINGS = RolloutSettings(max_prompt_tokens=32, max_response_tokens=24, timeout_s=TIMEOUT_S, kv_cache_mb=64)
SAMPLING = Sampling(n=2, temperature=1.0, max_tokens=8, seed=1)


def test_responses_come_in_the_order_of_the_prompts_whenever_they_finish() -> None:
    prompts = [TokenPrompt("long", [5, 6, 7, 8]), TokenPrompt("short", [9]), TokenPrompt(2, [10, 11])]
    answers = asyncio.run(generate(Responder(BackwardsEngine("engine 0"), 1.0), prompts, SAMPLING, 1.0))
    assert [answer.prompt_id for answer in answers] == ["long", "short", 2]
    said = [[sample.tokens[sample.prompt_length :].tolist() for sample in answer.samples] for answer in answers]
    assert said == [[[8, 7, 6, 5]] * 2, [[9]] * 2, [[11, 10]] * 2]


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    engine = BackwardsEngine("engine 0")

    async def both() -> None:
        prompts = [TokenPrompt(0, [5, 6]), TokenPrompt(1, [STUCK, 6])]
        await generate(Responder(engine, 60.0), prompts, SAMPLING, 1.0)

    with pytest.raises(RolloutTimeout, match=r"^engine 0: 2 of 4 responses not done after 1 s$"):
        asyncio.run(both())
    assert engine.open == {}


def test_the_registry_gives_the_engine_that_the_configuration_names(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, "backwards", PLACE)
    model, settings = ModelDescription.read(tiny_model), RolloutSettings(tp=2)
    with pytest.raises(ConfigError, match=r"^rollout\.kv_cache_mb: a CPU engine needs it$"):
        registry.check_engine(model, "float32", settings, gpu=False)
    with pytest.raises(ConfigError, match=r"^rollout\.tp=2: the engine has one worker$"):
        registry.check_engine(model, "float32", settings.model_copy(update={"engine": BackwardsSettings()}), gpu=False)
    with pytest.raises(ConfigError, match=r"^rollout\.dp=2: engine backwards has one data-parallel rank only$"):
        registry.check_engine(model, "float32", RolloutSettings(dp=2).model_copy(update={"engine": BackwardsSettings()}), gpu=False)


def test_a_setting_is_refused_where_the_engine_lacks_what_it_needs(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.ENGINES, "backwards", PLACE)
    free = ("rollout.mode=free", "rollout.max_lag=1", "algorithm.correction={type: tis}")
    refused = {
        r"^sync\.overlap=true: the engine backwards has no receive_buckets and no load_received$": (
            *free,
            "sync.transport=gloo",
            "sync.overlap=true",
        ),
        r"^sync\.transport=gloo: the engine backwards has no connect$": ("sync.transport=gloo",),
        r"^placement\.engines=shared: the engine backwards has no sleep and no wake$": ("placement.engines=shared",),
    }
    for message, given in refused.items():
        config = load(Job(tmp_path, tiny_model).write(), list(given), TrainConfig)
        check_offered(config)
        backwards = config.rollout.model_copy(update={"engine": BackwardsSettings()})
        with pytest.raises(ConfigError, match=message):
            check_offered(config.model_copy(update={"rollout": backwards}))


async def _contract(kind: type[Engine], model: Path) -> None:
    engine, prompts = kind("engine 0"), ([5, 6, 7, 8], [9, 10, 11], [20, 21])
    assert await engine.start(Setup(model, "float32", SETTINGS, 1, gpu=False))
    trainer = Trainer(engine, "shm")
    try:
        for version in (1, 2):
            sent = await trainer.update(stored(model))
            assert compare(sent, await engine.fingerprints(TIMEOUT_S)) == []
            requests = [Request(number, prompt, 8, 1.0, seed=number) for number, prompt in enumerate(prompts)]
            await engine.submit(requests, TIMEOUT_S)
            finished = list[Finished]()
            while len(finished) < len(requests):
                finished += await engine.receive(TIMEOUT_S)
            assert sorted(one.id for one in finished) == [0, 1, 2]  # type: ignore[type-var]
            for one in finished:
                request, sample = requests[one.id], one.sample  # type: ignore[call-overload]
                assert sample.tokens[: sample.prompt_length].tolist() == request.tokens
                assert 0 < len(sample.tokens) - sample.prompt_length == len(sample.rollout_logp) <= request.max_tokens
                assert {span.version for span in sample.weight_versions} == {version}
        await engine.submit([Request("late", [5, 6], 24, 1.0, seed=1)], TIMEOUT_S)
        await engine.abort(["late", "unknown"], TIMEOUT_S)
        assert [one.id for one in await engine.receive(TIMEOUT_S)] == ["late"]
        assert await engine.receive(0.1) == []
        engine.check_health()
        await engine.ping(TIMEOUT_S)
    finally:
        trainer.close()
        await engine.close()
        await engine.close()


@pytest.mark.parametrize("kind", rows([BackwardsEngine, VllmEngine], [BackwardsEngine]))
def test_any_engine_answers_each_request_once_from_the_weights_it_was_sent(host: Host, tiny: Path, kind: type[Engine]) -> None:
    """The fingerprints of two updates are the trainer's; an aborted request comes back, too, and an unknown one does not."""
    host.run(_contract, kind, tiny)


def test_a_mixture_is_refused_where_its_engine_cannot_report_the_experts_that_are_asked_for(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.ENGINES, "backwards", PLACE)
    model, vllm = ModelDescription.read(tiny_model), RolloutSettings()
    backwards = vllm.model_copy(update={"engine": BackwardsSettings()})
    check_reported_experts(model, vllm, RoutingSettings(replay="r3"))
    check_reported_experts(model, backwards, RoutingSettings(sample=0.0, replay="r2"))
    with pytest.raises(ConfigError, match=r"^routing\.sample=0\.01: the engine backwards does not report .*; give routing\.sample=0$"):
        check_reported_experts(model, backwards, RoutingSettings())
    with pytest.raises(ConfigError, match=r"^routing\.replay=r3: .*; give routing\.replay=r2 or off with routing\.sample=0$"):
        check_reported_experts(model, backwards, RoutingSettings(replay="r3"))
    check_reported_experts(description_of(MODELS["Llama-3-70B"]), backwards, RoutingSettings())


def test_several_callers_share_an_engine_and_each_gets_its_own() -> None:
    """With the same ids; one gives up after a second, and the others do not notice."""
    engine = BackwardsEngine("engine 0")

    async def all_three() -> list[object]:
        responder = Responder(engine, 60.0)
        asked: list[tuple[list[int], float]] = [([5, 6], 60.0), ([STUCK, 6], 0.2), ([7, 8, 9], 60.0)]
        calls = [generate(responder, [TokenPrompt(0, tokens)], SAMPLING, timeout_s) for tokens, timeout_s in asked]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    first, late, last = asyncio.run(all_three())
    assert isinstance(late, RolloutTimeout) and engine.open == {}
    for answers, said in ((first, [6, 5]), (last, [9, 8, 7])):
        assert isinstance(answers, list)
        assert [sample.tokens[sample.prompt_length :].tolist() for sample in answers[0].samples] == [said] * 2


class Doomed(BackwardsEngine):
    """Dies while it takes its second requests, which `receive` tells first."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._taking = asyncio.Event()

    async def submit(self, requests: Sequence[Request], timeout_s: float) -> None:
        if self.open:
            self._taking.set()
            await asyncio.sleep(0.05)
            raise EngineDead(f"{self.label}: died")
        await super().submit(requests, timeout_s)

    async def receive(self, timeout_s: float) -> list[Finished]:
        await self._taking.wait()
        raise EngineDead(f"{self.label}: died")


def test_the_death_of_an_engine_is_the_only_error_of_those_who_wait_and_of_those_who_come() -> None:
    others = list[dict[str, Any]]()

    async def both() -> list[object]:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: others.append(context))
        responder, prompts = Responder(Doomed("engine 0"), 60.0), [TokenPrompt(0, [5, 6])]
        waits = asyncio.create_task(generate(responder, prompts, SAMPLING, 60.0))
        await asyncio.sleep(0.05)
        told = await asyncio.gather(waits, generate(responder, prompts, SAMPLING, 60.0), return_exceptions=True)
        await asyncio.sleep(0.1)
        gc.collect()  # a task's error that nobody has taken is told when the task is forgotten
        return list(told)

    assert [repr(error) for error in asyncio.run(both())] == ["EngineDead('engine 0: died')"] * 2
    assert others == []
