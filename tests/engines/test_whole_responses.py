"""Responses leave vLLM's core whole, and are those that come token by token."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.config import RolloutSettings
from megarl.engines.engine import Request, Setup
from megarl.engines.responder import Responder
from megarl.engines.vllm.engine import VllmEngine
from tests.engines.engine_host import Host
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S

SETTINGS = RolloutSettings(max_prompt_tokens=32, max_response_tokens=96, timeout_s=TIMEOUT_S, kv_cache_mb=64)
NEVER = "no model of random weights says this"


async def _whole(tiny: Path) -> None:
    engine, outputs = VllmEngine("engine 0"), list[Any]()
    await engine.start(Setup(tiny, "float32", SETTINGS, 1, gpu=False, report_experts=True))
    process = engine._llm.output_processor.process_outputs

    def counted(found: list[Any], *rest: Any) -> Any:
        outputs.extend(found)
        return process(found, *rest)

    engine._llm.output_processor.process_outputs = counted
    respond = Responder(engine, TIMEOUT_S)

    def requests(stop: tuple[str, ...]) -> list[Request]:
        return [Request((prompt.id, index), prompt.tokens, 48, 1.0, 7 + index, stop=stop) for prompt in PROMPTS for index in range(4)]

    try:
        whole = await respond.all(requests(()), TIMEOUT_S)
        assert len(outputs) == len(whole) and all(output.finish_reason is not None for output in outputs)
        outputs.clear()
        by_token = await respond.all(requests((NEVER,)), TIMEOUT_S)
        assert len(outputs) == sum(sample.response_length for sample in by_token) > 10 * len(by_token)
    finally:
        await engine.close()
    for one, other in zip(whole, by_token, strict=True):
        assert one.finish_reason == other.finish_reason and one.tokens.tolist() == other.tokens.tolist()
        assert one.rollout_logp.tobytes() == other.rollout_logp.tobytes()
        assert (
            one.routed_experts is not None and other.routed_experts is not None and np.array_equal(one.routed_experts, other.routed_experts)
        )


def test_whole_responses_are_those_that_come_token_by_token(host: Host, tiny: Path) -> None:
    host.run(_whole, tiny)


async def _given_up() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from megarl.engines.vllm.whole_responses import WholeResponses

    final = SimpleNamespace(sampling_params=SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    streamed = SimpleNamespace(sampling_params=SamplingParams(output_kind=RequestOutputKind.DELTA))
    responses, requests = WholeResponses(), {"a": final, "b": final, "c": streamed}
    for token in (3, 4):
        [sent] = responses.ended([EngineCoreOutput(name, [token]) for name in "abc"], requests)
        assert (sent.request_id, sent.new_token_ids) == ("c", [token])
    assert responses._begun.keys() == {"a", "b"}
    del requests["a"], requests["c"]
    responses.forget(requests)
    assert responses._begun.keys() == {"b"}
    [sent] = responses.ended([EngineCoreOutput("b", [5], finish_reason=FinishReason.LENGTH)], {})
    assert sent.new_token_ids == [3, 4, 5] and sent.new_logprobs is None and sent.routed_experts is None
    [sent] = responses.ended([EngineCoreOutput("d", [6], finish_reason=FinishReason.STOP)], {})  # its first token is its last
    assert sent.new_token_ids == [6] and not responses._begun


def test_a_request_that_is_given_up_leaves_nothing_behind(host: Host) -> None:
    host.run(_given_up)
