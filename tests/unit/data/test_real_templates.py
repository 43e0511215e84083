"""What is read and learned of every layout of data is what the templates of published models write, or the row is refused.

Each expectation is computed from `apply_chat_template` alone, on growing prefixes of the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyarrow import parquet

from megarl.config import ConfigError, ConversationSource, FileSource, PreferenceData, PreferenceSource
from megarl.config.data import DataSettings, SftData
from megarl.data.conversations import Conversation
from megarl.data.preferences import load_preferences
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_answers, load_conversations
from tests.real_tokenizers import MODELS
from tests.unit.data.written import written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT = 4096
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a town up.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKS, ASKS_ON = {"role": "user", "content": "Where is Bergen, 世界?"}, {"role": "user", "content": "And Turku?"}
SAYS, SAYS_ON = {"role": "assistant", "content": "In Norway."}, {"role": "assistant", "content": "In Finland."}
THINKS, THINKS_ON = {**SAYS, "reasoning_content": "A fjord town."}, {**SAYS_ON, "reasoning_content": "An old capital."}
INLINE = {"role": "assistant", "content": "<think>\nA fjord town.\n</think>\n\nIn Norway."}
ANSWERS = {"role": "tool", "tool_call_id": "call00001", "name": "lookup", "content": "Vestland"}


def call(*towns: str, content: str | None = None, **keys: Any) -> dict[str, Any]:
    """A message of the assistant's with a call for each town."""
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "lookup", "arguments": {"town": town}}}
        for n, town in enumerate(towns, 1)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **keys}


LAYOUTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [ASKS, SAYS]},
    "system": {"messages": [SYSTEM, ASKS, SAYS]},
    "turns": {"messages": [SYSTEM, ASKS, SAYS, ASKS_ON, SAYS_ON]},
    "blanks": {"messages": [{"role": "user", "content": " Where?\n"}, {"role": "assistant", "content": "\n In Norway. \n"}]},
    "ended": {"messages": [ASKS, SAYS, ASKS_ON]},
    "reasoning": {"messages": [ASKS, THINKS]},
    "reasoning-turns": {"messages": [ASKS, THINKS, ASKS_ON, THINKS_ON]},
    "reasoning-last": {"messages": [ASKS, SAYS, ASKS_ON, THINKS_ON]},
    "inline-reasoning": {"messages": [ASKS, INLINE]},
    "inline-turns": {"messages": [ASKS, INLINE, ASKS_ON, INLINE]},
    "call": {"messages": [ASKS, call("Bergen")], "tools": [TOOL]},
    "call-answer": {"messages": [SYSTEM, ASKS, call("Bergen"), ANSWERS, SAYS], "tools": [TOOL]},
    "text-call": {"messages": [ASKS, call("Bergen", content="One moment."), ANSWERS, SAYS], "tools": [TOOL]},
    "reasoning-call": {"messages": [ASKS, call("Bergen", reasoning_content="A fjord town."), ANSWERS, THINKS], "tools": [TOOL]},
    "two-calls": {"messages": [ASKS, call("Bergen", "Turku"), ANSWERS, ANSWERS, SAYS], "tools": [TOOL]},
    "calls-turns": {"messages": [ASKS, call("Bergen"), ANSWERS, SAYS, ASKS_ON, call("Turku"), ANSWERS, SAYS_ON], "tools": [TOOL]},
    "unweighted": {"messages": [ASKS, {**SAYS, "weight": 0}, ASKS_ON, {**SAYS_ON, "weight": 1}]},
    "unweighted-last": {"messages": [ASKS, SAYS, ASKS_ON, {**SAYS_ON, "weight": 0}]},
    "unweighted-call": {"messages": [ASKS, call("Bergen", weight=0), ANSWERS, SAYS]},
    "arguments": {"messages": [ASKS, SAYS, ASKS_ON, SAYS_ON], "chat_template_kwargs": {"enable_thinking": False}},
}
CALLS = {"call", "call-answer", "text-call", "reasoning-call", "two-calls", "calls-turns", "unweighted-call"}
REASONING = {"reasoning", "reasoning-turns", "reasoning-last", "reasoning-call"}
# Layouts that a template cannot write, or not so that what it writes begins with its own generation prompt.
REFUSED: dict[str, set[str]] = {
    "qwen3": set(),
    "qwen3-thinking": set(),
    "deepseek-r1": LAYOUTS.keys() - {"inline-reasoning", "inline-turns", "unweighted-call"},  # takes <think> out of every finished turn
    "qwen2.5": REASONING,
    "qwen3.5": set(),
    "llama-3.1": {*REASONING, "text-call", "two-calls"},  # takes one call, and leaves out the text beside it
    "gemma-3": {*REASONING, *CALLS},
    "glm-4.5": set(),
    "gpt-oss": {*REASONING, "text-call", "two-calls"},  # takes one call; the text beside it goes once an answer follows
}
OPENS = ["qwen3-thinking", "qwen3.5", "deepseek-r1"]  # their generation prompts end with <think>


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(name: str, published: dict[str, PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    return published[name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_learned_is_what_the_template_writes_after_what_is_read(
    name: str, layout: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    row = LAYOUTS[layout]
    wanted = lessons(tokenizer, row)
    assert (wanted is None) == (layout in REFUSED[name])
    source = ConversationSource(path=written(tmp_path / "rows.jsonl", row))
    if wanted is None:
        with pytest.raises(ConfigError, match=r"^data\.train\.path: .*rows\.jsonl:1: "):
            load_conversations(source, tokenizer, SftData(train=source), LIMIT, "data.train")
        return
    conversations = load_conversations(source, tokenizer, SftData(train=source), LIMIT, "data.train")
    assert taught(tokenizer, conversations) == wanted
    first = [message["role"] == "assistant" and message.get("weight") != 0 for message in row["messages"]].index(True)
    assert conversations[0].tokens[: conversations[0].prompt_length].tolist() == rendered(tokenizer, row, first, True, tokenize=True)


@pytest.mark.parametrize("layout", ["turns", "inline-turns", "calls-turns"])
def test_the_last_turn_alone_is_learned_where_that_is_asked(
    name: str, layout: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    if layout in REFUSED[name]:
        return
    row = LAYOUTS[layout]
    source = ConversationSource(path=written(tmp_path / "rows.jsonl", row))
    made = load_conversations(source, tokenizer, SftData(train=source, train_on="last"), LIMIT, "data.train")
    assert taught(tokenizer, made) == (lessons(tokenizer, row) or [])[-1:]


def test_the_run_s_arguments_are_those_of_every_row_and_none_is_ignored_in_silence(
    name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = LAYOUTS["arguments"]
    if "arguments" in REFUSED[name]:
        return
    source = ConversationSource(path=written(tmp_path / "rows.jsonl", row))
    own = load_conversations(source, tokenizer, SftData(train=source), LIMIT, "data.train")
    known = "enable_thinking" in str(tokenizer.chat_template)
    assert ("enable_thinking" in capsys.readouterr().err) == (not known)
    written(source.path, {"messages": row["messages"]})
    data = SftData(train=source, template_args=row["chat_template_kwargs"])
    if not known:
        with pytest.raises(ConfigError, match=r"^data\.template_args\.enable_thinking: "):
            load_conversations(source, tokenizer, data, LIMIT, "data.train")
        return
    assert taught(tokenizer, load_conversations(source, tokenizer, data, LIMIT, "data.train")) == taught(tokenizer, own)


def test_a_row_of_parquet_is_the_row_of_jsonl(name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Arrow fills every message with the keys of all others."""
    rows = [LAYOUTS[layout] for layout in LAYOUTS if layout not in REFUSED[name]]
    columns = [{"tools": None, "chat_template_kwargs": None, **row} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "rows.parquet")
    sources = [ConversationSource(path=path) for path in (written(tmp_path / "rows.jsonl", *rows), tmp_path / "rows.parquet")]
    lines, table = (
        taught(tokenizer, load_conversations(source, tokenizer, SftData(train=source), LIMIT, "data.train")) for source in sources
    )
    assert lines == table != []


def test_a_prompt_is_what_the_template_writes_up_to_where_the_assistant_speaks(
    name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    whole, refused = [], 0
    for row in LAYOUTS.values():
        for count in range(1, len(row["messages"])):
            if row["messages"][count]["role"] != "assistant":
                continue
            prompt = {**row, "prompt": row["messages"][:count], "reward_model": {"ground_truth": "Norway"}}
            source = FileSource(path=written(tmp_path / "prompts.jsonl", {key: prompt[key] for key in prompt if key != "messages"}))
            ids = rendered(tokenizer, row, count, True, tokenize=True)
            if isinstance(ids, Exception) or not _reads(tokenizer, row, count):
                refused += 1
                with pytest.raises(ConfigError, match=r"^data\.train\.path: .*prompts\.jsonl:1: "):
                    load_prompts(source, tokenizer, DataSettings(train=source), LIMIT, "data.train")
                continue
            [made] = load_prompts(source, tokenizer, DataSettings(train=source), LIMIT, "data.train")
            assert made.tokens == ids
            whole.append(made.tokens)
    assert len(whole) > 9 and (refused > 0) == (name in ("deepseek-r1", "llama-3.1", "gemma-3", "gpt-oss"))
    assert {tokens.count(tokenizer.bos_token_id) for tokens in whole} == {int(bool(MODELS[name].bos) and MODELS[name].begins)}


@pytest.mark.parametrize(
    "sides",
    [(SAYS, SAYS_ON), (call("Bergen"), call("Turku")), (call("Bergen"), SAYS), (THINKS, {**SAYS, "reasoning_content": "A guess."})],
    ids=["text", "calls", "call", "reasoning"],
)
def test_a_pair_differs_in_what_the_template_writes_of_its_sides(
    sides: tuple[dict[str, Any], ...], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tools = {"tools": [TOOL]} if any("tool_calls" in side for side in sides) else {}
    rows = [{"messages": [SYSTEM, ASKS, side], **tools} for side in sides]
    chosen, rejected = (row["messages"] for row in rows)
    source = PreferenceSource(path=written(tmp_path / "pairs.jsonl", {"chosen": chosen, "rejected": rejected, **tools}))
    data = PreferenceData(train=source, eval=source)
    wanted = [lessons(tokenizer, row) for row in rows]
    if None in wanted:
        with pytest.raises(ConfigError, match=r"^data\.train\.path: .*pairs\.jsonl:1: "):
            load_preferences(source, tokenizer, data, LIMIT, "data.train", "dpo.max_tokens")
        return
    [pair] = load_preferences(source, tokenizer, data, LIMIT, "data.train", "dpo.max_tokens")
    assert [taught(tokenizer, [side]) for side in (pair.chosen, pair.rejected)] == wanted
    prompt = rendered(tokenizer, rows[0], 2, True, tokenize=True)
    assert [side.tokens[: side.prompt_length].tolist() for side in (pair.chosen, pair.rejected)] == [prompt, prompt]


@pytest.mark.parametrize("name", OPENS)
def test_an_answer_does_not_open_the_reasoning_again(name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    row = {"prompt": [ASKS], "reward_model": {"ground_truth": INLINE["content"]}}
    source = FileSource(path=written(tmp_path / "prompts.jsonl", row))
    made = load_answers(source, tokenizer, SftData(train=source), LIMIT, "data.train")
    assert taught(tokenizer, made) == lessons(tokenizer, LAYOUTS["inline-reasoning"])


def test_a_raw_text_begins_as_the_tokenizer_begins_it_and_once(name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token else []
    rows = [{"prompt": f"{start}17 + 17 =", "reward_model": {"ground_truth": "34"}} for start in ("", tokenizer.bos_token or "")]
    source = FileSource(path=written(tmp_path / "prompts.jsonl", *rows))
    made = load_prompts(source, tokenizer, DataSettings(train=source, chat=False), LIMIT, "data.train")
    plain = tokenizer("17 + 17 =", add_special_tokens=False)["input_ids"]
    assert [prompt.tokens for prompt in made] == [[*(bos if MODELS[name].begins else []), *plain], [*bos, *plain]]


def rendered(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], count: int, generation: bool, tokenize: bool = False) -> Any:
    """What the template writes of the first `count` messages of a row, or what it raises."""
    messages = [_plain(message) for message in row["messages"][:count]]
    if "['arguments'] +" in tokenizer.chat_template:
        messages = [_with_text_arguments(message) for message in messages]
    settings = {"tools": row.get("tools"), "return_dict": False, **row.get("chat_template_kwargs", {})}
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=generation, tokenize=tokenize, **settings)
    except Exception as error:
        return error


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value or "" for key, value in message.items() if key != "weight"}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    functions = [one["function"] for one in message.get("tool_calls", ())]
    calls = [{"type": "function", "function": {**one, "arguments": json.dumps(one["arguments"])}} for one in functions]
    return {**message, "tool_calls": calls} if calls else message


def lessons(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> list[tuple[str, str]] | None:
    """What is to be read before each of the assistant's messages, and what of it is to be learned; None: the template cannot write it."""
    learned = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant" and message.get("weight") != 0]
    pairs = [_lesson(tokenizer, row, number) for number in learned]
    return None if None in pairs else [pair for pair in pairs if pair]


def _lesson(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], number: int) -> tuple[str, str] | None:
    read, whole = (rendered(tokenizer, row, number + turn, generation=not turn) for turn in (0, 1))
    if isinstance(read, Exception) or isinstance(whole, Exception):
        return None
    content = row["messages"][number]["content"] or ""
    if whole.startswith(read):
        text = whole[len(read) :]
    elif read.endswith("<think>\n") and content.startswith("<think>\n"):
        text = content.removeprefix("<think>\n")  # finished turns lose their reasoning
    else:
        return None
    if not _reads(tokenizer, row, number, rewritten=True) or not all(part in text for part in said(row["messages"][number])):
        return None
    ends = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and text.rstrip().endswith(str(token))]
    return read, text.rstrip() if ends else text.rstrip() + tokenizer.eos_token


def _reads(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], count: int, rewritten: bool = False) -> bool:
    """Whether the prompt that `count` messages make has all that they say, up to earlier reasoning and, if `rewritten`, the assistant's."""
    read = rendered(tokenizer, row, count, True)
    messages = [message for message in row["messages"][:count] if message["role"] != "assistant" or not rewritten]
    texts = [part for message in messages for part in said({**message, "reasoning_content": ""}, earlier=True)]
    return all(part in read for part in [*texts, *(tool["function"]["description"] for tool in row.get("tools", ()))])


def said(message: dict[str, Any], earlier: bool = False) -> Iterator[str]:
    """Every text of a message, without the reasoning if it is an earlier one."""
    texts = re.split("</?think>", message.get("content") or "")
    yield from (part.strip() for part in (texts[-1:] if earlier else texts))
    yield message.get("reasoning_content", "")
    for one in message.get("tool_calls", ()):
        yield from (one["function"]["name"], one["function"]["arguments"]["town"])


def taught(tokenizer: PreTrainedTokenizerBase, conversations: list[Conversation]) -> list[tuple[str, str]]:
    """What is read before each run of learned tokens, and what these say."""
    pairs = []
    for conversation in conversations:
        tokens, first = conversation.tokens.tolist(), conversation.prompt_length
        mask = [False] * first + ([True] * (len(tokens) - first) if conversation.loss_mask is None else conversation.loss_mask.tolist())
        for learned, run in groupby(range(len(tokens)), key=mask.__getitem__):
            places = list(run)
            if learned:
                pairs.append(tuple(text(tokenizer, part) for part in (tokens[: places[0]], tokens[places[0] : places[-1] + 1])))
    return pairs  # type: ignore[return-value]


def text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
