"""Agents with the real vLLM and OpenAI's client: every sampled token is learned once, with the log-prob of what was read before it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.batch import Sample
from megarl.config import EnvironmentSettings, RolloutSettings
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.engines.engine import Setup
from megarl.engines.episodes import Limits, Played, Start, play
from megarl.engines.generate import Sampling
from megarl.engines.responder import Responder
from megarl.engines.vllm.engine import VllmEngine
from megarl.environments.hosts import agent_host
from tests.engines.engine_host import Host
from tests.engines.transformers_reference import TIMEOUT_S, logp

SETTINGS = RolloutSettings(max_prompt_tokens=32, max_response_tokens=160, timeout_s=TIMEOUT_S, kv_cache_mb=64)
LIMITS = Limits(prompt_tokens=32, response_tokens=160, turns=8, turn_tokens=12)
SAMPLING = Sampling(n=2, temperature=0.7, max_tokens=160, seed=3)
AGENTS = "tests.engines.agents_played"


def settings(name: str, **source: Any) -> EnvironmentSettings:
    tree = {"source": {"type": "agent", "function": f"{AGENTS}:{name}", "model": "tiny-agent", **source}, "step_s": 60, "workers": 2}
    return EnvironmentSettings.model_validate({**tree, "sandbox": {"network": True, "memory_gb": 4}})


async def _played(tiny: Path, orders: list[list[Start]], name: str, limits: Limits) -> list[list[list[Played]]]:
    """The same episodes, once in each order."""
    tokenizer, runs = load_tokenizer(tiny), list[list[list[Played]]]()
    engine, host = VllmEngine("engine 0"), agent_host(settings(name))
    await engine.start(Setup(tiny, "float32", SETTINGS, 1, gpu=False, report_experts=True))

    def text_of(turn: Sample) -> str:
        return decode(tokenizer, turn.tokens[turn.prompt_length :].tolist(), finished=turn.finish_reason == "stop")

    try:
        for starts in orders:
            runs.append(await play(Responder(engine, TIMEOUT_S), host, TurnTokens(tokenizer), text_of, starts, SAMPLING, limits, TIMEOUT_S))
    finally:
        host.close()
        await engine.close()
    return runs


def test_each_context_of_a_branched_conversation_is_as_transformers_reads_it(host: Host, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    starts = [Start(number, [], seed=100 + number) for number in range(3)]
    first, again = host.run(_played, tiny, [starts, starts[::-1]], "branching", LIMITS)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(tiny)
    for start, played, replayed in zip(starts, first, again[::-1], strict=True):
        for one, same in zip(played, replayed, strict=True):
            sample = one.sample
            assert (one.error, one.turns, one.reward, len(sample.starts)) == (None, 7, start.seed / 100, 4)
            assert sample.turn_rewards == ((sample.response_length, one.reward),) and sample.loss_mask is not None
            read = [decode(tokenizer, tokens.tolist(), finished=False) for tokens in np.split(sample.tokens, sample.starts)]
            begins = [f"<|user|>begin {start.seed}<|", f"<|user|>begin {start.seed}<|", "<|user|>in short<|"]
            assert all(text.startswith(begin) for text, begin in zip(read, begins, strict=False))
            assert "<|user|>go on<|" in read[0] and "<|user|>or so<|" in read[1] and "<|user|>end<|" in read[2]
            assert read[1].startswith(read[0].partition("<|user|>go on<|")[0])
            assert {text.partition("<|assistant|>")[0] for text in read[3:]} == {"<|user|>left", "<|user|>right"}
            seen = 0
            for begin, tokens in zip((0, *sample.starts), np.split(sample.tokens, sample.starts), strict=True):
                own = slice(begin - sample.prompt_length, begin - sample.prompt_length + len(tokens))
                if begin == 0:
                    own = slice(0, len(tokens) - sample.prompt_length)
                mask, recorded = sample.loss_mask[own], sample.rollout_logp[own]
                expected = logp(model, tokens.tolist(), len(tokens) - len(mask) or 1, SAMPLING.temperature).numpy()[-len(mask) :]
                mask, recorded = mask[-len(expected) :], recorded[-len(expected) :]
                assert np.abs(recorded - expected)[mask].max() < 1e-5 and (recorded[~mask] == 0).all()
                seen += int(mask.sum())
            assert seen == sample.loss_tokens
            assert sample.routed_experts is not None and len(sample.routed_experts) == len(sample.tokens) - 5
            alike = sample.starts[2]  # before the two that were asked at once, whose order may be either
            assert np.array_equal(sample.tokens[:alike], same.sample.tokens[:alike])
            for name in ("rollout_logp", "loss_mask"):
                first_ones = [getattr(each, name)[: alike - sample.prompt_length] for each in (sample, same.sample)]
                assert np.array_equal(*first_ones), name
            assert sorted(map(bytes, np.split(sample.tokens, sample.starts))) == sorted(
                map(bytes, np.split(same.sample.tokens, same.sample.starts))
            )
