"""Agents over public clients: each format says what the policy said; whatever an agent does ends its own episode, and says why."""

import asyncio
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.batch import Sample
from megarl.config import ConfigError, EnvironmentSettings, PromptFormat, SandboxSettings
from megarl.data.tokenizer import decode, encode
from megarl.data.turns import TurnTokens
from megarl.engines.agents import AgentPlayer, contexts
from megarl.engines.engine import Request
from megarl.engines.episodes import Limits, Played, Start, chained, joined, play
from megarl.engines.generate import Sampling
from megarl.engines.responder import Responder
from megarl.engines.worker import Playing, RolloutWorker
from megarl.environments import hosts
from megarl.environments.agents import endpoint
from megarl.environments.agents.questions import Answer, ChatRequest, Refusal
from megarl.environments.hosts import agent_host
from megarl.sandbox.level import Level
from tests.engines.backwards_engine import BackwardsEngine
from tests.unit.environments import agents

AGENTS = "tests.unit.environments.agents"
LIMITS = Limits(prompt_tokens=2000, response_tokens=2000, turns=40)


class Parrot(BackwardsEngine):
    """Says what follows the last "say" of what it reads, `late_s` late. An answer that it is to say slowly never comes."""

    late_s = 0.0

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__("engine 0")
        self._tokenizer = tokenizer

    def response(self, request: Request) -> list[int]:
        text = decode(self._tokenizer, request.tokens, finished=False).rpartition("say ")[2]
        text = re.split(r"<\|im_end\|>|\n</tool_response>", text)[0]
        stop = min((text.find(one) + len(one) for one in request.stop if one in text), default=None)
        [tokens] = encode(self._tokenizer, [text[:stop] + ("" if stop else "<|im_end|>")], special=False)
        return tokens

    async def submit(self, requests: Sequence[Request], timeout_s: float) -> None:
        await asyncio.sleep(self.late_s)
        await super().submit([one for one in requests if "slowly" not in decode(self._tokenizer, one.tokens, finished=False)], timeout_s)


@pytest.fixture(scope="module")
def tokenizer(published: dict[str, PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    return published["qwen3"]


def settings(step_s: float = 30.0, **source: Any) -> EnvironmentSettings:
    tree = {"source": {"type": "agent", "model": "parrot", **source}, "step_s": step_s, "workers": 1}
    return EnvironmentSettings.model_validate({**tree, "sandbox": {"network": True, "memory_gb": 4}})


def played(
    tokenizer: PreTrainedTokenizerBase, setting: EnvironmentSettings, starts: Sequence[Start], limits: Limits = LIMITS, n: int = 1
) -> list[Played]:
    def text_of(turn: Sample) -> str:
        return decode(tokenizer, turn.tokens[turn.prompt_length :].tolist(), finished=turn.finish_reason == "stop")

    async def body() -> list[list[Played]]:
        host, responder = agent_host(setting), Responder(Parrot(tokenizer), 60.0)
        try:
            return await play(responder, host, TurnTokens(tokenizer), text_of, starts, Sampling(n, 1.0, 99, 1), limits, 100.0)
        finally:
            host.close()

    return [one for episodes in asyncio.run(body()) for one in episodes]


def one(tokenizer: PreTrainedTokenizerBase, name: str, limits: Limits = LIMITS, **more: Any) -> Played:
    [episode] = played(tokenizer, settings(function=f"{AGENTS}:{name}", **more), [Start(0, [], seed=7)], limits)
    return episode


def test_a_call_and_its_result_go_on_with_the_very_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """The client sends back content and calls, without reasoning; the policy reads what it sampled, as one context."""
    episode = one(tokenizer, "tools_in_chat")
    assert (episode.error, episode.reward, episode.turns, len(episode.sample.starts)) == (None, 1.0, 3, 1)
    sample, mask = episode.sample, episode.sample.loss_mask
    first = sample.tokens[: sample.starts[0]]
    text = decode(tokenizer, first.tolist(), finished=False)
    assert text.count("<think>\nhm\n</think>\n\nso <tool_call>") == 2, (
        "what was asked and what was sampled, not a rendering without reasoning"
    )
    assert (
        text.endswith("<tool_response>\nsay 5\n</tool_response><|im_end|>\n<|im_start|>assistant\n5<|im_end|>") and '"name": "add"' in text
    )
    assert mask is not None
    sampled = np.split(first[sample.prompt_length :], np.flatnonzero(np.diff(mask[: len(first) - sample.prompt_length].astype(int))) + 1)
    assert [decode(tokenizer, part.tolist(), finished=False) for part in sampled[::2]][1] == "5<|im_end|>"


def test_calls_in_the_form_of_the_model_s_template(published: dict[str, PreTrainedTokenizerBase]) -> None:
    """Qwen3.5's: the client's arguments have the types of the schema, and what it sends back goes on with the very tokens."""
    episode = one(published["qwen3.5"], "tools_in_xml")
    assert (episode.error, episode.reward, episode.turns, len(episode.sample.starts)) == (None, 1.0, 3, 1)
    text = decode(published["qwen3.5"], episode.sample.tokens[: episode.sample.starts[0]].tolist(), finished=False)
    assert "<tool_response>\nsay 5\n</tool_response><|im_end|>" in text


def test_tools_of_a_template_whose_calls_are_not_read(published: dict[str, PreTrainedTokenizerBase]) -> None:
    episode = one(published["gpt-oss"], "tools_in_chat")
    assert re.search("chat template writes calls in a form that is not read", episode.error or "")


@pytest.mark.parametrize("name", ["streams", "responses", "messages_by_hand", "anthropic"])
def test_each_format_says_what_the_policy_said(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if name == "anthropic" and find_spec("anthropic") is None:
        pytest.skip("the package anthropic is not installed")
    episode = one(tokenizer, name)
    assert (episode.error, episode.reward) == (None, 1.0)
    assert len(episode.sample.starts) == {"streams": 3, "responses": 0, "messages_by_hand": 0, "anthropic": 0}[name]


def test_a_stream_is_not_silent_while_it_waits(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that gives up after a second without a byte waits three for an answer that is streamed."""
    monkeypatch.setattr(Parrot, "late_s", 3.0)
    monkeypatch.setattr(endpoint, "ALIVE_S", 0.1)
    episode = one(tokenizer, "waits")
    assert (episode.error, episode.reward, episode.turns) == (None, 1.0, 1)


def test_an_error_ends_a_stream_that_has_begun(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(self: AgentPlayer, question: ChatRequest) -> Answer:
        await asyncio.sleep(0.5)
        raise Refusal(500, "engine_failed", "the engine has failed")

    monkeypatch.setattr(AgentPlayer, "answer", late)
    monkeypatch.setattr(endpoint, "ALIVE_S", 0.1)
    assert re.search("APIError: the engine has failed", one(tokenizer, "waits").error or "")


@pytest.mark.skipif(find_spec("agents") is None, reason="the package openai-agents is not installed")
def test_the_loop_of_openai_agents_asks_until_an_answer_is_plausible(tokenizer: PreTrainedTokenizerBase) -> None:
    """The example's, in which a question says what the answer will be."""
    rows = {"say abc": "abc", "say cab": "abc", "say abd abc": "abc", f"say {'ab ' * 30}abc": "abc"}  # right, wrong, implausible, too long
    starts = [Start(n, [], seed=n, task={"prompt": prompt, "answer": rows[prompt], "meta": {}}) for n, prompt in enumerate(rows)]
    limits = Limits(2000, 2000, turns=3, turn_tokens=20)
    episodes = played(tokenizer, settings(function="examples.agents.stock:solve"), starts, limits)
    assert [(one.error, one.reward, one.turns, one.info["tries"]) for one in episodes] == [
        (None, 1.0, 1, 1.0),
        (None, 0.0, 1, 1.0),
        (None, 0.0, 3, 3.0),
        (None, 0.0, 3, 3.0),
    ]


def test_bad_requests_are_refused_by_name_and_the_episode_goes_on(tokenizer: PreTrainedTokenizerBase) -> None:
    episode = one(tokenizer, "refused")
    assert (episode.error, episode.reward, episode.turns, episode.info) == (None, 0.5, 1, {"cases": 22.0})


FAILURES = {
    "no_call": "no call: the agent ended without asking the policy",
    "another_model": r"NotFoundError: .*there is no model 'gpt-9': environment\.source\.model=parrot",
    "raises": "ValueError: mine",
    "killed": "worker died: SIGKILL",
    "hangs": "timeout",
    "no_reward": "bad return: reward=None",
    "not_a_number": "bad return: reward='much'",
    "too_much": "bad return: 1048594 bytes, more than 65536",
    "floods": "flood: more than 100 of its requests were refused",
}


def test_what_an_agent_does_ends_its_own_episode_and_says_why(tokenizer: PreTrainedTokenizerBase) -> None:
    """All run at once, in one sandbox, beside one that does its work."""
    names = [*FAILURES, "half_open", "goes_away"]
    starts = [Start(number, [], seed=number, task={"prompt": name, "answer": "", "meta": {}}) for number, name in enumerate(names)]
    episodes = played(tokenizer, settings(function=f"{AGENTS}:by_name", step_s=5.0), starts)
    for name, episode in zip(names, episodes, strict=True):
        if name in FAILURES:
            assert episode.error is not None and re.match(FAILURES[name], episode.error), (name, episode.error)
            assert episode.reward == 0 and episode.sample.finish_reason == "abort"
        else:
            assert (episode.error, episode.reward, episode.turns) == (None, 1.0, 1), name


def test_a_key_ends_with_its_episode(tokenizer: PreTrainedTokenizerBase) -> None:
    names = ("leaves_its_key", "finds_a_key")
    starts = [Start(number, [], seed=1, task={"prompt": name, "answer": "", "meta": {}}) for number, name in enumerate(names)]
    for episode in played(tokenizer, settings(function=f"{AGENTS}:by_name", processes=1), starts):
        assert (episode.error, episode.reward, episode.turns) == (None, 1.0, 1)


def test_without_a_reward_the_last_answer_is_what_is_scored(tokenizer: PreTrainedTokenizerBase) -> None:
    episode = one(tokenizer, "unscored", rewards=False)
    assert (episode.error, episode.reward, episode.text) == (None, 0.0, "the last answer")


def test_a_sandbox_without_a_loopback_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = settings(function=f"{AGENTS}:no_call").model_copy(update={"sandbox": SandboxSettings()})
    monkeypatch.setattr(hosts, "level", lambda: Level.LANDLOCK)
    with pytest.raises(ConfigError, match=r"^environment\.sandbox\.network=false: agents ask over a loopback address, .* level landlock"):
        agent_host(alone)
    monkeypatch.setattr(hosts, "level", lambda: Level.NAMESPACES)
    agent_host(alone).close()


def test_contexts_are_the_paths_of_a_tree_each_token_in_one() -> None:
    """[1 2] is asked and answered 3; then twice gone on with; then something else is, and gone on with."""

    def turn(prompt: list[int], *said: int) -> Sample:
        return Sample(np.array([*prompt, *said], np.int32), len(prompt), np.zeros(len(said), np.float32), "stop")

    turns = [turn([1, 2], 3), turn([1, 2, 3, 4], 5), turn([1, 2, 3, 6], 7), turn([8], 9), turn([1, 2, 3, 6, 7], 1), turn([8, 9, 2], 2)]
    grouped = contexts(turns)
    numbers = {id(each): number for number, each in enumerate(turns)}
    assert [[numbers[id(each)] for each in one] for one in grouped] == [[0, 1], [2, 4], [3, 5]]
    whole = chained([joined(one, "stop") for one in grouped])
    assert whole.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 8, 9, 2, 2] and list(whole.starts) == [5, 11]
    assert whole.loss_mask is not None and np.flatnonzero(whole.loss_mask).tolist() == [0, 2, 7, 8, 10, 12]


def test_the_driver_is_told_of_every_context(tokenizer: PreTrainedTokenizerBase) -> None:
    """An engine's worker plays agents, and describes an episode by its first opening and all that follows."""
    worker: Any = RolloutWorker("engine 0", "tests.engines.backwards_engine:BackwardsEngine", {}, Path(os.devnull))

    async def body() -> list[Any]:
        worker._responder, worker._tokenizer, worker._ends, worker._timeout_s = Responder(Parrot(tokenizer), 60.0), tokenizer, (), 100.0
        playing = Playing(settings(function=f"{AGENTS}:by_name"), LIMITS, PromptFormat())
        task = {"prompt": "tools_in_chat", "answer": "", "meta": {}}
        try:
            return await worker.respond([Start(0, [], seed=1, task=task)], Sampling(2, 1.0, 99, 1), None, playing)
        finally:
            worker._host[1].close()

    responses, *payloads = asyncio.run(body())
    assert len(responses) == len(payloads) == 2
    for response, sample in zip(responses, payloads, strict=True):
        assert (response.starts, response.loss_tokens, response.text) == (sample.starts, sample.loss_tokens, agents.CALL)
        episode = response.episode
        assert (episode.reward, episode.turns, episode.error) == (1.0, 3, None) and episode.opening.count("<|im_start|>") == 3
        assert (
            episode.transcript.startswith("<think>\nhm\n</think>\n\nso <tool_call>") and episode.transcript.count("<|im_start|>user") == 2
        )
        assert episode.transcript.endswith(f"<|im_start|>assistant\n{agents.CALL}<|im_end|>")


def test_limits_refuse_and_what_an_agent_makes_of_it_is_cut_or_goes_on(tokenizer: PreTrainedTokenizerBase) -> None:
    cut = one(tokenizer, "until_refused", Limits(100, 2000, turns=5))
    assert (cut.error, cut.reward, cut.turns, cut.sample.finish_reason) == (None, 0.0, 5, "length")
    full = one(tokenizer, "until_refused", Limits(100, 60, turns=40))
    assert (full.error, full.sample.finish_reason) == (None, "length") and len(full.sample.tokens) <= full.sample.prompt_length + 60
    again = one(tokenizer, "forgets", Limits(100, 70, turns=40))
    assert again.error is None and again.reward >= 1 and again.sample.finish_reason == "stop" and len(again.sample.starts) >= 1


def test_a_command_is_an_agent(tokenizer: PreTrainedTokenizerBase) -> None:
    tasks: list[dict[str, Any]] = [{"prompt": text, "answer": "", "meta": {}} for text in ("good", "bad")]
    starts = [Start(number, [], seed=number + 5, task=task) for number, task in enumerate(tasks)]
    command = ["python", str(Path(__file__).with_name("agents.py"))]
    good, bad = played(tokenizer, settings(command=command), starts)
    assert (good.error, good.reward, good.info, good.text) == (None, 0.25, {"seed": 5.0}, "good")
    assert bad.error == "RuntimeError: the command ended with exit status 3"
    with pytest.raises(ConfigError, match=r"^environment\.source\.command: no-such-agent: no such program in the sandbox"):
        played(tokenizer, settings(command=["no-such-agent"]), starts)
