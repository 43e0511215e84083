"""Episodes of several turns with the real vLLM: every token's log-prob and experts are those of the whole conversation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch import Sample, VersionSpan, pack
from megarl.config import EnvironmentSettings, RolloutSettings
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.engines.engine import Request, RolloutTimeout, Setup
from megarl.engines.episodes import Limits, Played, Start, joined, play
from megarl.engines.generate import Sampling, TokenPrompt
from megarl.engines.parts import added, whole
from megarl.engines.responder import Responder
from megarl.engines.vllm.engine import VllmEngine
from megarl.environments.hosts import open_host
from tests.engines.backwards_engine import STUCK, BackwardsEngine
from tests.engines.engine_host import Host
from tests.engines.transformers_reference import TIMEOUT_S, generate, logp

SETTINGS = RolloutSettings(max_prompt_tokens=32, max_response_tokens=160, timeout_s=TIMEOUT_S, kv_cache_mb=64)
LIMITS = Limits(prompt_tokens=32, response_tokens=160, turns=4, turn_tokens=12)
TREE = {"source": {"type": "function", "path": "tests.unit.environments.worlds:Counting"}, "step_s": 60}
STARTS = [Start(number, [], seed=100 + number) for number in range(8)]
SAMPLING = Sampling(n=2, temperature=0.7, max_tokens=160, seed=3)


async def _episodes(tiny: Path) -> list[list[list[Played]]]:
    """The same episodes from two engines, the second with another order of the starts."""
    tokenizer, runs = load_tokenizer(tiny), list[list[list[Played]]]()
    for starts in (STARTS, STARTS[::-1]):
        engine, host = VllmEngine("engine 0"), open_host(EnvironmentSettings.model_validate(TREE))
        await engine.start(Setup(tiny, "float32", SETTINGS, 1, gpu=False, report_experts=True))

        def text_of(turn: Sample) -> str:
            return decode(tokenizer, turn.tokens[turn.prompt_length :].tolist(), finished=turn.finish_reason == "stop")

        try:
            runs.append(await play(Responder(engine, TIMEOUT_S), host, TurnTokens(tokenizer), text_of, starts, SAMPLING, LIMITS, TIMEOUT_S))
            if len(runs) == 1:
                await _sampling(engine, tiny)
                await _cut(engine)
        finally:
            host.close()
            await engine.close()
    return [runs[0], runs[1][::-1]]


def _mask(sample: Sample) -> np.ndarray:
    assert sample.loss_mask is not None
    return sample.loss_mask


def test_log_probs_and_experts_of_whole_conversations_are_transformers(host: Host, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    runs = host.run(_episodes, tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    logits: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, given, _: logits.append(given[0] @ gate.weight.T))
    tokenizer, seen = load_tokenizer(tiny), set()
    for played, again in zip(*([one for episodes in run for one in episodes] for run in runs), strict=True):
        sample, mask = played.sample, _mask(played.sample)
        for name in ("tokens", "rollout_logp", "loss_mask", "routed_experts"):
            assert np.array_equal(getattr(sample, name), getattr(again.sample, name)), name
        assert (played.text, played.reward, played.turns) == (again.text, again.reward, again.turns) and played.error is None
        assert played.turns == 4 and played.reward == 1.0 and sample.finish_reason == "length"
        logits.clear()
        expected = logp(model, sample.tokens.tolist(), sample.prompt_length, SAMPLING.temperature).numpy()
        assert np.abs(sample.rollout_logp - expected)[mask].max() < 1e-5 and (sample.rollout_logp[~mask] == 0).all()
        assert (sample.rollout_logp[mask] < 0).all() and sample.weight_versions == (VersionSpan(0, 0),)
        chosen = torch.stack([layer.reshape(-1, 8)[:-1].topk(2).indices for layer in logits], 1).numpy()
        assert sample.routed_experts is not None and np.array_equal(np.sort(chosen), np.sort(sample.routed_experts))
        whole = decode(tokenizer, sample.tokens.tolist(), finished=False)
        assert whole.count("<|user|>turn ") == 3 and whole.endswith(played.text + "<|end|>" * int(sample.tokens[-1] == 1))
        batch = pack([sample])
        assert batch.count_N.item() == mask.sum() == sample.loss_tokens and (batch.extra_T["rollout_logp"][~batch.mask_T] == 0).all()
        assert [end for end, _ in sample.turn_rewards] == [*(np.flatnonzero(np.diff(mask.astype(int)) == -1) + 1), len(mask)]
        seen.add(tuple(sample.tokens.tolist()))
    assert len(seen) == 16


async def _sampling(engine: VllmEngine, tiny: Path) -> None:
    """Log-probs are those of the part of the distribution that was drawn from; a stop ends a response and is part of it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    prompts = [TokenPrompt(number, [5 + number, 40, 77]) for number in range(4)]
    tried: list[dict[str, float]] = [{"top_p": 0.3}, {"top_k": 5}, {"min_p": 0.4}, {"top_p": 0.8, "top_k": 20, "min_p": 0.1}]
    for rules in tried:
        sampling = Sampling(4, 0.7, 24, 5).within(SETTINGS.model_copy(update=rules))
        whole = 0.0
        for answer in await generate(engine, prompts, sampling):
            for sample in answer.samples:
                ids = torch.tensor([sample.tokens.tolist()])
                with torch.no_grad():
                    full = (model(ids).logits[0, sample.prompt_length - 1 : -1].float() / 0.7).log_softmax(-1)
                kept, targets = _kept(full, rules), ids[0, sample.prompt_length :, None]
                drawn = torch.from_numpy(sample.rollout_logp)
                torch.testing.assert_close(drawn, kept.log_softmax(-1).gather(1, targets).squeeze(1), atol=1e-5, rtol=0)
                whole += float((drawn - full.gather(1, targets).squeeze(1)).mean()) / 16
        assert whole > 0.3, "which is not what the whole distribution says"
    drawn_8 = (await generate(engine, prompts[:1], Sampling(8, 1.0, 64, 5)))[0].samples
    number, free = max(enumerate(drawn_8), key=lambda one: one[1].response_length)
    said = free.tokens[free.prompt_length :].tolist()
    tokenizer = load_tokenizer(tiny)
    texts = [tokenizer.decode([token]) for token in said]
    place, letter = next((place, text) for place, text in enumerate(texts) if place > 9 and text.isalpha() and text not in texts[:place])
    first = next(place for place, text in enumerate(texts) if letter in text and not text.startswith("<|"))
    stops: list[tuple[dict[str, Any], int]] = [({"stop_token_ids": [said[place]]}, place + 1), ({"stop": [letter]}, first + 1)]
    for stop, length in stops:
        sampling = Sampling(8, 1.0, 64, 5).within(SETTINGS.model_copy(update=stop))
        ended = (await generate(engine, prompts[:1], sampling))[0].samples[number]
        assert ended.finish_reason == "stop" and ended.tokens[ended.prompt_length :].tolist() == said[:length]
        assert np.array_equal(ended.rollout_logp, free.rollout_logp[:length])


async def _cut(engine: VllmEngine) -> None:
    """Responses that are cut after every seventh token and go on in new requests, in another order, are the whole ones, bit for bit."""
    responder, prompts = Responder(engine, TIMEOUT_S), [[5 + number, 40, 77] for number in range(8)]

    async def asked(contexts: dict[int, list[int]], tokens: int) -> dict[int, Sample]:
        begun = {n: len(context) - 1 if len(context) > 3 else 0 for n, context in contexts.items()}
        requests = [Request(n, contexts[n], tokens, 0.7, 1000 + n % 5, by_position=True, experts_from=begun[n]) for n in contexts]
        return dict(zip(contexts, await responder.all(requests, TIMEOUT_S), strict=True))

    uncut = await asked(dict(enumerate(prompts)), 40)
    parts = await asked(dict(enumerate(prompts)), 7)
    while left := [n for n, part in parts.items() if part.finish_reason == "length" and part.response_length < 40]:
        contexts = {n: parts[n].tokens.tolist() for n in reversed(left)}
        most = min(7, 43 - max(map(len, contexts.values())))
        for number, more in (await asked(contexts, most)).items():
            rows = [sample.routed_experts for sample in (parts[number], more) if sample.routed_experts is not None]
            parts[number] = replace(whole([parts[number], added(more)]), routed_experts=np.concatenate(rows))
    assert max(sample.response_length for sample in uncut.values()) > 20
    for number, sample in uncut.items():
        for name in ("tokens", "rollout_logp", "routed_experts"):
            assert np.array_equal(getattr(sample, name), getattr(parts[number], name)), (number, name)
        assert (sample.finish_reason, sample.weight_versions) == (parts[number].finish_reason, parts[number].weight_versions)
    again = await responder.all([Request(0, prompts[0], 40, 0.7, 1000), Request(1, prompts[0], 40, 0.7, 1001, by_position=True)], TIMEOUT_S)
    assert not np.array_equal(again[0].tokens, uncut[0].tokens), "who does not ask for it draws as before"


def _kept(logp_TV: torch.Tensor, rules: dict[str, float]) -> torch.Tensor:
    """What is left of a distribution: min_p, then the top_k likeliest, then the smallest set of at least top_p; -inf elsewhere."""
    if "min_p" in rules:
        logp_TV = logp_TV.masked_fill(logp_TV.exp() < rules["min_p"] * logp_TV.exp().amax(-1, keepdim=True), -torch.inf)
    if "top_k" in rules:
        logp_TV = logp_TV.masked_fill(logp_TV < logp_TV.topk(int(rules["top_k"])).values[:, -1:], -torch.inf)
    if "top_p" in rules:
        order = logp_TV.softmax(-1).sort(descending=True)
        past = (order.values.cumsum(-1) - order.values >= rules["top_p"]).gather(1, order.indices.argsort(-1))
        logp_TV = logp_TV.masked_fill(past, -torch.inf)
    return logp_TV


def _turn(tokens: list[int], prompt: int, version: int) -> Sample:
    rows = np.arange(len(tokens) - 1, dtype=np.uint8)[:, None, None] + 100 * version
    logp = -np.arange(1, len(tokens) - prompt + 1, dtype=np.float32)
    return Sample(np.array(tokens, np.int32), prompt, logp, "stop", (VersionSpan(0, version),), rows)


def test_turns_are_joined_by_the_first_that_fed_a_token() -> None:
    """Each turn's prompt is all before it; versions count from its first token; the last token's experts come with the next turn."""
    turns = [_turn([5, 6, 7, 8], 2, 0), _turn([5, 6, 7, 8, 20, 9], 5, 0), _turn([5, 6, 7, 8, 20, 9, 21, 10, 11], 7, 1)]
    whole = joined(turns, "stop")
    assert whole.tokens.tolist() == [5, 6, 7, 8, 20, 9, 21, 10, 11] and whole.prompt_length == 2
    assert _mask(whole).tolist() == [True, True, False, True, False, True, True]
    assert whole.rollout_logp.tolist() == [-1, -2, 0, -1, 0, -1, -2]
    assert whole.weight_versions == (VersionSpan(0, 0), VersionSpan(5, 1))
    assert whole.routed_experts is not None and whole.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 105, 106, 107]
    alone = joined(turns[:1], "stop")
    assert alone.loss_mask is None and all(
        np.array_equal(getattr(alone, name), getattr(turns[0], name)) for name in ("tokens", "rollout_logp")
    )


def test_limits_and_failures_end_an_episode_with_what_it_has(tiny_model: Path) -> None:
    """With an engine that says the prompt backwards, so that contexts double."""
    import asyncio

    tokenizer = load_tokenizer(tiny_model)

    def run(limits: Limits, starts: list[Start], timeout_s: float = 60.0) -> list[Played]:
        host, engine = open_host(EnvironmentSettings.model_validate(TREE)), BackwardsEngine("engine 0")

        async def body() -> list[list[Played]]:
            return await play(Responder(engine, TIMEOUT_S), host, TurnTokens(tokenizer), lambda _: "x", starts, SAMPLING, limits, timeout_s)

        try:
            return [one for episodes in asyncio.run(body()) for one in episodes]
        finally:
            host.close()
            assert engine.open == {}

    [cut, _] = run(Limits(32, 60, 9), STARTS[:1])  # the second turn would need more than is left
    assert cut.sample.finish_reason == "length" and cut.turns == len(cut.sample.turn_rewards) and cut.sample.response_length <= 60
    assert cut.sample.loss_mask is None or cut.sample.loss_mask[-1], "ends with the policy's tokens"
    [few, _] = run(Limits(32, 400, 2, 5), STARTS[:1])
    assert few.turns == 2 and few.sample.loss_tokens == 10
    [long, _] = run(Limits(4, 60, 9), STARTS[:1])
    assert long.error is not None and long.error.startswith("too long: an opening of 1") and long.turns == 0
    assert long.sample.loss_tokens == 0 and long.sample.finish_reason == "abort" and long.reward == 0.0
    with pytest.raises(RolloutTimeout, match=r"^engine 0: 2 of 4 episodes not done after 8 s: 2 wait for the engine, 0 for environments$"):
        slow = Start("stuck", [STUCK, 5], 1, {"answer": ""})
        told = TREE["source"]
        TREE["source"] = {"type": "function", "path": "tests.unit.environments.worlds:TaskTold"}
        try:
            run(Limits(32, 60, 9), [slow, Start("quick", [5, 6], 1, {"answer": "x"})], timeout_s=8.0)
        finally:
            TREE["source"] = told


def test_a_request_carries_every_rule() -> None:
    from megarl.engines.generate import request_for

    rules = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "stop_token_ids": [4], "stop": ["x"]}
    sampling = Sampling(2, 0.5, 7, 9).within(RolloutSettings(**rules))  # type: ignore[arg-type]
    assert request_for("a", [1], 5, sampling, 8) == Request("a", [1], 5, 0.5, 8, 0.5, 3, 0.1, [4], ["x"])
