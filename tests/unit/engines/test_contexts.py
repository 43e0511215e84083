"""Episodes whose chat template rewrites earlier turns: contexts are its renderings, and each sampled token is learned once, in its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megarl.batch import Sample, VersionSpan, pack, pack_scored
from megarl.config import PromptFormat
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import decode, encode, load_tokenizer
from megarl.data.turns import Dialogue, Reading, TurnTokens
from megarl.engines.engine import Request
from megarl.engines.episodes import Limits, Played, Start, play
from megarl.engines.generate import Sampling
from megarl.engines.worker import RolloutWorker
from megarl.environments.protocol import Turn
from megarl.observe.metrics import Sum
from megarl.observe.samples import record
from megarl.response import EpisodeSummary, Response
from megarl.rewards.score import Score
from megarl.step.metrics import environment_metrics
from tests.unit.data.test_metaspace import PLAIN, metaspace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Reasoning, in brackets, is written after the last question only.
BRACKETS = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{ '<|assistant|>' + (m.content.split(']')[-1] if loop.index0 < ns.last else m.content) + '<|end|>' }}"
    "{%- else -%}{{ '<|' + m.role + '|>' + m.content }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


class Scripted:
    """In the place of an engine's responder: says the next text of a script, and keeps what it was asked."""

    label = "engine 0"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, script: Sequence[str]) -> None:
        self._tokenizer, self._script, self.asked = tokenizer, list(script), list[Request]()

    async def __call__(self, request: Request) -> Sample:
        turn = len(self.asked)
        self.asked.append(request)
        text = self._tokenizer(self._script[turn], add_special_tokens=False, split_special_tokens=True)["input_ids"]
        said = [*text, self._tokenizer.eos_token_id][: request.max_tokens]
        tokens = np.array([*request.tokens, *said], np.int32)
        logp = -(100.0 * (turn + 1) + np.arange(len(said), dtype=np.float32))
        experts = np.stack([np.full(len(tokens) - 1, turn), np.arange(len(tokens) - 1)], 1).astype(np.uint8)[:, None]
        reason = "stop" if said[-1] == self._tokenizer.eos_token_id else "length"
        return Sample(tokens, len(request.tokens), logp, reason, (VersionSpan(0, turn),), experts)

    async def withdraw(self, tasks: Sequence[Any]) -> None:
        pass


class Asks:
    """An environment of questions, each worth its number; also an episode of it, and its host."""

    def __init__(self, questions: Sequence[dict[str, Any]]) -> None:
        self._questions, self.heard = questions, list[str]()

    def open(self) -> Asks:
        return self

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        return Turn(None)

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        self.heard.append(text)
        number = len(self.heard)
        done = number > len(self._questions)
        return Turn(None if done else [self._questions[number - 1]], float(number), done)

    async def close(self) -> None:
        pass


def played(
    tokenizer: PreTrainedTokenizerBase, script: Sequence[str], questions: Sequence[dict[str, Any]], **limits: int
) -> tuple[Any, ...]:
    """The episode, what the engine was asked, and what the environment heard."""
    engine, world = Scripted(tokenizer, script), Asks(questions)
    turns = TurnTokens(tokenizer)

    def text_of(turn: Sample) -> str:
        return decode(tokenizer, turn.tokens[turn.prompt_length :].tolist(), finished=turn.finish_reason == "stop")

    task = {"prompt": "q0", "answer": "", "meta": {}}
    start = Start(0, turns.prompted(task).opening(), 0, task)
    most = Limits(**{"prompt_tokens": 64, "response_tokens": 400, "turns": 9, **limits})
    [[one]] = asyncio.run(play(engine, world, turns, text_of, [start], Sampling(1, 1.0, 100, 0), most, 60.0))  # type: ignore[arg-type]
    return one, engine.asked, world.heard


SCRIPT = ["[a] one", "[b] two", "three", "[c] four"]
USER, TOOL = {"role": "user", "content": "q1"}, {"role": "tool", "content": "t"}


@pytest.fixture(scope="module")
def qwen3(published: dict[str, PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    return published["qwen3"]


def check(tokenizer: PreTrainedTokenizerBase, one: Played, asked: Sequence[Request], script: Sequence[str], anew: Sequence[bool]) -> None:
    """`anew`: whether each turn's context is a new one, and not what was read and sampled before it."""
    sample = one.sample
    bounds = [0, *sample.starts, len(sample.tokens)]
    contexts = [sample.tokens[begin:end].tolist() for begin, end in zip(bounds, bounds[1:], strict=False)]
    assert len(contexts) == sum(anew), "a context begins only where something is rewritten"
    mask, logp = np.zeros(len(sample.tokens), bool), np.zeros(len(sample.tokens), np.float32)
    mask[sample.prompt_length :], logp[sample.prompt_length :] = sample.loss_mask, sample.rollout_logp
    place, spans, rewards, rows = -1, [], [], list[list[int]]()
    for turn, (request, text, fresh) in enumerate(zip(asked, script, anew, strict=True)):
        said = [*encode(tokenizer, [text], special=False)[0], tokenizer.eos_token_id]
        place += fresh
        assert contexts[place][: len(request.tokens) + len(said)] == [*request.tokens, *said], "the tokens that were sampled"
        begin = bounds[place] + len(request.tokens)
        assert mask[begin : begin + len(said)].all()
        assert logp[begin : begin + len(said)].tolist() == [-(100 * (turn + 1) + n) for n in range(len(said))], "of the turn's own context"
        spans.append(VersionSpan(begin - sample.prompt_length if turn else 0, turn))
        rewards.append((begin + len(said) - sample.prompt_length, turn + 1.0))
        if fresh:
            rows.append([])
        rows[-1] += [turn] * (len(request.tokens) + len(said) - 1 - len(rows[-1]))
    assert mask.sum() == sum(len(encode(tokenizer, [text], special=False)[0]) + 1 for text in script), "each sampled token once"
    assert (logp[~mask] == 0).all() and tuple(sample.weight_versions) == tuple(spans) and list(sample.turn_rewards) == rewards
    assert sample.routed_experts is not None and sample.routed_experts[:, 0, 0].tolist() == [turn for own in rows for turn in own]
    assert sample.routed_experts[:, 0, 1].tolist() == [position for own in contexts for position in range(len(own) - 1)]
    batch = pack([sample])
    assert len(batch) == len(sample.routed_experts) == batch.length_N.item() and batch.count_N.item() == mask.sum()
    context_T, count_C = batch.contexts()
    assert count_C.tolist() == [len(own) - 1 for own in contexts] and batch.position_T.tolist() == list(range(len(batch)))
    assert batch.target_T[batch.mask_T].tolist() == sample.tokens[mask].tolist()
    begin_T = 0 if batch.begin_T is None else batch.begin_T
    assert (batch.begin_T is None) == (len(contexts) == 1)
    for number, own in enumerate(contexts):
        here = context_T == number
        assert batch.input_T[here].tolist() == own[:-1] and batch.target_T[here].tolist() == own[1:]
        assert (batch.position_T - begin_T)[here].tolist() == list(range(len(own) - 1))
    assert pack_scored([sample]).input_T.tolist() == contexts[-1]


def test_each_sampled_token_is_in_the_context_in_which_it_was_sampled(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = BRACKETS
    questions = [TOOL, USER, USER]  # the tool's answer rewrites nothing, nor does a question after a turn without reasoning
    one, asked, heard = played(tokenizer, SCRIPT, questions)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q0"}]
    for turn, request in enumerate(asked):
        if turn in (0, 2):
            assert request.tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        messages += [{"role": "assistant", "content": SCRIPT[turn]}, *questions[turn : turn + 1]]
    check(tokenizer, one, asked, SCRIPT, [True, False, True, False])
    assert heard == SCRIPT and one.turns == 4 and one.reward == 10.0 and one.sample.finish_reason == "stop" and one.text == "[c] four"


def test_a_template_that_only_appends_gives_one_context(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    one, asked, _ = played(tokenizer, SCRIPT, [USER, USER, USER])
    check(tokenizer, one, asked, SCRIPT, [True, False, False, False])
    assert one.sample.starts == ()


def test_contexts_of_qwen3_are_its_template_s(qwen3: PreTrainedTokenizerBase) -> None:
    script = ["<think>\nA.\n</think>\n\nOne.", "<think>\n\n</think>\n\nTwo.", "Three."]
    one, asked, _ = played(qwen3, script, [USER, USER])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q0"}]
    for request, said in zip(asked, ("One.", "Two.", "Three."), strict=True):
        assert request.tokens == qwen3.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        messages += [{"role": "assistant", "content": said}, USER]
    check(qwen3, one, asked, script, [True, True, True])


def test_limits_hold_in_every_context(tiny_model: Path) -> None:
    """A context with its turn is at most the opening and `response_tokens` long; so are all turns together, without an opening."""
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = BRACKETS
    script, questions = ["[aaaaaaaa] one"] * 9, [USER] * 9
    whole, asked, _ = played(tokenizer, script, questions)
    assert whole.turns == 9 and len(whole.sample.starts) == 8
    turn, opening = len(encode(tokenizer, script[:1], special=False)[0]) + 1, len(asked[0].tokens)
    spent, asked, _ = played(tokenizer, script, questions, response_tokens=4 * turn + 3)
    assert spent.sample.finish_reason == "length" and spent.sample.loss_tokens <= 4 * turn + 3
    assert all(len(request.tokens) + request.max_tokens <= opening + 4 * turn + 3 for request in asked)
    few, asked, _ = played(tokenizer, script, questions, turns=3, turn_tokens=5)
    assert few.turns == 3 and few.sample.loss_tokens == 15 and all(request.max_tokens == 5 for request in asked)


def test_an_episode_that_fails_keeps_what_was_sampled(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = BRACKETS.replace(
        "'<|' + m.role", "('' if m.role in ['user', 'tool'] else raise_exception('no')) + '<|' + m.role"
    )
    one, asked, _ = played(tokenizer, SCRIPT, [USER, {"role": "judge", "content": "x"}])
    assert one.error is not None and one.error.endswith("refuses the prompt: no") and one.sample.finish_reason == "abort"
    assert len(one.sample.starts) == 1 and one.turns == 2 and one.sample.turn_rewards == () and one.reward == 0.0


def test_a_turn_that_the_template_refuses_cuts_the_episode_and_keeps_its_rewards(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    tokenizer.chat_template = "{%- for m in messages if not m.content %}{{ raise_exception('empty') }}{%- endfor %}" + BRACKETS
    one, asked, _ = played(tokenizer, ["[a] one", "", "never"], [USER, USER])
    assert one.error is None and one.sample.finish_reason == "length" and len(asked) == one.turns == 2 and one.reward == 3.0


def test_arguments_of_the_run_reach_every_context(qwen3: PreTrainedTokenizerBase) -> None:
    turns = TurnTokens(qwen3, PromptFormat(template_args={"enable_thinking": False}))
    dialogue = turns.prompted({"prompt": "q0"})
    assert qwen3.decode(dialogue.opening()).endswith("<think>\n\n</think>\n\n")
    reading = dialogue.after(encode(qwen3, ["One.<|im_end|>"], special=False)[0], "One.", [USER])
    assert reading is not None and reading.anew and qwen3.decode(reading.tokens).count("<think>") == 1


def summary(tokenizer: PreTrainedTokenizerBase, one: Played, tmp_path: Path) -> EpisodeSummary:
    """What a reader gets to see of an episode."""
    worker: Any = RolloutWorker("engine 0", "tests.engines.backwards_engine:BackwardsEngine", {}, tmp_path)
    worker._tokenizer = tokenizer
    return worker._episode(one)


def test_a_reader_sees_the_conversation_once_as_it_was_sampled(tiny_model: Path, tmp_path: Path) -> None:
    """Whether contexts go on or begin anew, and whether a turn was cut or not."""
    tokenizer = load_tokenizer(tiny_model)
    shown = []
    for template in (BRACKETS, BRACKETS.replace("m.content.split(']')[-1]", "m.content")):
        tokenizer.chat_template = template
        for limits in ({}, {"turn_tokens": 4}):
            one, _, _ = played(tokenizer, SCRIPT, [TOOL, USER, USER], **limits)
            assert len(one.sample.starts) == (template == BRACKETS) * (1 if not limits else len(one.sample.starts))
            seen = summary(tokenizer, one, tmp_path)
            shown.append((seen.opening, seen.transcript))
    assert shown[0] == shown[2] and shown[1] == shown[3]
    turns = ["[a] one<|end|><|tool|>t<|assistant|>[b] two<|end|><|user|>q1<|assistant|>three<|end|><|user|>q1<|assistant|>[c] four<|end|>"]
    assert shown[0] == ("<|user|>q0<|assistant|>", *turns)


def test_a_long_rendering_holds_up_no_other_episode(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends only when something else has been done on the same loop."""
    begun, others, after = threading.Event(), threading.Event(), Dialogue.after

    def slow(self: Dialogue, *given: Any) -> Reading | None:
        begun.set()
        assert others.wait(10)
        return after(self, *given)

    async def other() -> None:
        while not begun.is_set():
            await asyncio.sleep(0.01)
        others.set()

    class Beside(Asks):
        async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
            self.task = asyncio.create_task(other())
            return await super().reset(seed, task)

    monkeypatch.setattr(Dialogue, "after", slow)
    monkeypatch.setattr(f"{__name__}.Asks", Beside)
    one, _, _ = played(load_tokenizer(tiny_model), ["one", "two"], [USER])
    assert one.error is None and one.turns == 2 and others.is_set()


def test_an_episode_that_cannot_be_read_again_is_cut_and_counted(tmp_path: Path) -> None:
    """Here for a tokenizer that cannot write what spells a control token as plain text; what was earned stays."""
    tokenizer = metaspace("normalizer", PLAIN.replace("m.content", "m.content.split(';')[-1]"))
    one, asked, _ = played(tokenizer, ["a;b", "a; </s> b", "never"], [USER, USER])
    assert one.unreadable and one.error is None and one.sample.finish_reason == "length" and len(asked) == 2 and one.reward == 3.0
    seen = [Response(0, "", 4, 9, 5, False, None, 0, episode=summary(tokenizer, one, tmp_path))]
    assert record(Prompt(0, "q0", [], "", {}), seen[0], Score(3.0)).length == 5, "of 9, what the policy wrote"
    metrics = environment_metrics(seen)
    assert metrics["environment/unreadable"] == metrics["environment/cut"] == Sum(1.0) and metrics["environment/failed"] == Sum(0.0)
