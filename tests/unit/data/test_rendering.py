"""What is read and learned is what the chat template writes of the whole conversation, for every layout of data; or the row is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from megarl.checks.without_engines import check_sft
from megarl.config import (
    ConfigError,
    ConversationSource,
    FileSource,
    PreferenceData,
    PreferenceSource,
    SftConfig,
    SftData,
    SourceFormat,
    load,
)
from megarl.data.conversations import Conversation
from megarl.data.preferences import load_preferences
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_answers, load_conversations
from megarl.data.tokenizer import load_tokenizer
from tests.unit.data.templates import ENDS, TEMPLATES, dressed
from tests.unit.data.written import written

Row = dict[str, Any]
USER: Row = {"role": "user", "content": "2 + 2?"}
CALL: Row = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3.5}}}
AS_JSON: Row = {**CALL, "function": {"name": "add", "arguments": '{"a":  2, "b": 3.5}'}}
RESULT: Row = {"role": "tool", "content": "5.5", "tool_call_id": "abcdefghi"}
TOOLS: list[Row] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}
]


def says(content: Any, **more: Any) -> Row:
    return {"role": "assistant", "content": content, **more}


def chat(*messages: Row, **columns: Any) -> Row:
    return {"messages": list(messages), **columns}


LEFT_OUT, WRITES = "the chat template leaves out", "the chat template writes"
LAYOUTS: dict[str, Row] = {
    "one turn": {"messages": [USER, says("4")]},
    "system": {"messages": [{"role": "system", "content": "Be brief"}, USER, says("4")]},
    "two turns": {"messages": [USER, says("4"), {"role": "user", "content": "And 3?"}, says("7")]},
    "white space": {"messages": [{"role": "user", "content": " 2?\n"}, says(" 4 "), USER, says("5\n")]},
    "reasoning": {"messages": [USER, says("4", reasoning_content="It is"), USER, says("5", reasoning_content="No")]},
    "reasoning in the text": {"messages": [USER, says("<think>\nIt is\n</think>\n\n4"), USER, says("<think>\nNo\n</think>\n\n5")]},
    "call": {"messages": [USER, says("Let me add. ", tool_calls=[CALL]), RESULT, says("5.5")], "tools": TOOLS},
    "call as JSON": {"messages": [USER, says("Let me add. ", tool_calls=[AS_JSON]), RESULT, says("5.5")], "tools": json.dumps(TOOLS)},
    "call alone": {"messages": [USER, says(None, tool_calls=[CALL]), RESULT, says("5.5")], "tools": [json.dumps(TOOLS[0])]},
    "reasoning and call": {"messages": [USER, says("", reasoning_content="Add", tool_calls=[CALL]), RESULT, says("5.5")]},
}
TAKEN = {
    "chatml": ["one turn", "system", "two turns", "white space", "reasoning in the text", "call", "call as JSON", "call alone"],
    "qwen3": list(LAYOUTS),
    "thinking": list(LAYOUTS),
    "llama3": ["one turn", "system", "two turns", "white space", "reasoning in the text"],
    "gemma": ["one turn", "two turns", "white space", "reasoning in the text"],
    "phi3": ["one turn", "system", "two turns", "white space", "reasoning in the text"],
}


def conversations(path: Path, tokenizer: Any, *rows: Row, **data: Any) -> list[Conversation]:
    source = ConversationSource(path=written(path / "a.jsonl", *rows))
    return load_conversations(source, tokenizer, SftData(train=source, **data), 1024, "data.train")


def learned(tokenizer: Any, samples: list[Conversation]) -> list[list[str]]:
    """The learned texts of each sample, end tokens included."""
    texts = []
    for sample in samples:
        response = sample.tokens[sample.prompt_length :]
        mask = np.ones(len(response), bool) if sample.loss_mask is None else sample.loss_mask
        starts = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
        texts.append([tokenizer.decode(response[start:end]) for start, end in zip(starts[0::2], starts[1::2], strict=True)])
    return texts


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, layouts in TAKEN.items() for layout in layouts])
def test_what_is_learned_is_what_the_template_writes(name: str, layout: str, tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, row, end = tokenizers[name], LAYOUTS[layout], ENDS[name][0]
    samples = conversations(tmp_path, tokenizer, row)
    messages = [{key: value for key, value in message.items() if value is not None} for message in row["messages"]]

    def rendered(count: int, generation: bool) -> str:
        tools = TOOLS if "tools" in row else None
        text: str = tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False, add_generation_prompt=generation)
        return text

    expected, wholes = [], []
    for number in [number for number, message in enumerate(messages) if message["role"] == "assistant"]:
        read, whole = rendered(number, True), rendered(number + 1, False)
        assert whole.startswith(read)
        expected.append(whole[len(read) :].partition(end)[0] + end)
        wholes.append(whole)
    assert [text for texts in learned(tokenizer, samples) for text in texts] == expected, "each turn once, whole, in order"
    count = 0
    for sample, texts in zip(samples, learned(tokenizer, samples), strict=True):
        count += len(texts)
        text = tokenizer.decode(sample.tokens)
        assert wholes[count - 1].startswith(text) and text.endswith(end), "what is read is the template's text up to each turn"
    if name in ("chatml", "llama3", "gemma"):
        assert len(samples) == 1, "nothing is rewritten, so one sample has all turns"


def test_where_history_is_rewritten_each_question_has_a_sample_of_its_own(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tokenizers["qwen3"]
    calls = [says("", reasoning_content="Add", tool_calls=[CALL]), RESULT, says("5.5", reasoning_content="So")]
    row = {"messages": [USER, *calls, USER, says("4", reasoning_content="Sum")]}
    first, second = conversations(tmp_path, tokenizer, row)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3.5}}</tool_call>'
    assert learned(tokenizer, [first, second]) == [
        [f"<think>\nAdd\n</think>\n\n{call}<|im_end|>", "<think>\nSo\n</think>\n\n5.5<|im_end|>"],
        ["<think>\nSum\n</think>\n\n4<|im_end|>"],
    ]
    context = tokenizer.decode(second.tokens[: second.prompt_length])
    assert context == tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
    assert "Add" not in context and call in context
    [last] = conversations(tmp_path, tokenizer, row, train_on="last")
    assert last.tokens.tolist() == second.tokens.tolist()


def test_a_message_of_weight_0_is_read_and_not_learned(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    row = {"messages": [USER, says("5", weight=0), USER, says("4", weight=1), {**USER, "weight": 0}, says("4", weight=0)]}
    [sample] = conversations(tmp_path, tokenizers["chatml"], row)
    assert learned(tokenizers["chatml"], [sample]) == [["4<|im_end|>"]]
    assert "assistant\n5<|im_end|>" in tokenizers["chatml"].decode(sample.tokens[: sample.prompt_length])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: nothing is learned: the weight of the last message of the assistant's is 0$"):
        conversations(tmp_path, tokenizers["chatml"], row, train_on="last")


THOUGHT = "<think>\nIt is\n</think>\n\n4"


@pytest.mark.parametrize(
    ("name", "answer", "text"),
    [
        ("thinking", THOUGHT, "It is\n</think>\n\n4"),
        ("thinking", "It is\n</think>\n\n4", "It is\n</think>\n\n4"),  # as a rollout of such a model says it
        ("thinking", "<think>\nIt is", "It is"),
        ("r1", THOUGHT, "It is\n</think>\n\n4"),
        ("r1", "It is\n</think>\n\n4", "It is\n</think>\n\n4"),
        ("qwen3", THOUGHT, THOUGHT),
        ("qwen3", "4", "<think>\n\n</think>\n\n4"),
        ("chatml", "4<|im_end|>\n", "4"),
        ("gemma", "4<end_of_turn>", "4"),
        ("gemma", "4<|end|>", "4"),
        ("bare", "4", "4"),
    ],
)
def test_an_answer_follows_what_is_read_in_every_kind_of_data(
    name: str, answer: str, text: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    """Thinking that the generation prompt has opened is not opened again, and a turn ends once."""
    tokenizer, path = tokenizers[name], tmp_path / "b.jsonl"
    [said] = conversations(tmp_path, tokenizer, {"messages": [USER, says(answer)]})
    written(path, {"prompt": "2 + 2?", "answer": answer, "chosen": answer, "rejected": f"{answer}!"})
    source = FileSource(path=path, answer_key="answer")
    [response] = load_answers(source, tokenizer, SftData(train=source), 512, "data.train")
    pairs = PreferenceSource(path=path)
    [pair] = load_preferences(pairs, tokenizer, PreferenceData(train=pairs, eval=pairs), 512, "data.train", "dpo.max_tokens")
    [prompt] = load_prompts(source, tokenizer, SourceFormat(), 512, "data.train")
    for sample in (said, response, pair.chosen):
        assert learned(tokenizer, [sample]) == [[text + ENDS[name][0]]]
        assert sample.tokens[: sample.prompt_length].tolist() == prompt.tokens


def test_a_response_may_be_messages(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    steps = [says(None, reasoning_content="Add", tool_calls=[CALL]), RESULT, says("5.5")]
    row = {"prompt": [USER, says("4"), USER], "answer": steps, "tools": TOOLS}
    source = FileSource(path=written(tmp_path / "a.jsonl", row), answer_key="answer")
    [sample] = load_answers(source, tokenizers["qwen3"], SftData(train=source), 512, "data.train")
    assert tokenizers["qwen3"].decode(sample.tokens) + "\n" == tokenizers["qwen3"].apply_chat_template(
        [*row["prompt"], *steps], tools=TOOLS, tokenize=False
    )
    assert [text[:11] for text in learned(tokenizers["qwen3"], [sample])[0]] == ["<think>\nAdd", "<think>\n\n</"], "its two turns alone"
    for answer, line in (
        (steps[:2], "must end with one of the assistant's"),
        (["4", "5"], "must be a text or messages, not .*"),
        (" ", ".*"),
    ):
        written(source.path, {"prompt": "a", "answer": answer})
        with pytest.raises(ConfigError, match=rf"a\.jsonl:1: .*the response {line}$"):
            load_answers(source, tokenizers["qwen3"], SftData(train=source), 512, "data.train")


def test_pairs_may_differ_in_a_call_or_in_reasoning_alone(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    other = {**CALL, "function": {"name": "add", "arguments": {"a": 3, "b": 3.5}}}
    sides = {
        "call": (says(None, tool_calls=[CALL]), says(None, tool_calls=[other])),
        "reasoning": (says("4", reasoning_content="It is"), says("4", reasoning_content="No")),
    }
    source = PreferenceSource(path=tmp_path / "a.jsonl")
    data = PreferenceData(train=source, eval=source)
    for chosen, rejected in sides.values():
        for row in (
            {"prompt": [USER], "chosen": [chosen], "rejected": [rejected], "tools": TOOLS},
            {"chosen": [USER, chosen], "rejected": [USER, rejected], "tools": TOOLS},
        ):
            written(source.path, row)
            [pair] = load_preferences(source, tokenizers["qwen3"], data, 512, "data.train", "dpo.max_tokens")
            whole = tokenizers["qwen3"].apply_chat_template([USER, chosen], tools=TOOLS, tokenize=False)
            assert whole == tokenizers["qwen3"].decode(pair.chosen.tokens) + "\n"
            assert pair.chosen.tokens.tolist() != pair.rejected.tokens.tolist()
    written(source.path, {"prompt": [USER], "chosen": [says(None, tool_calls=[CALL]), RESULT, says("5.5")], "rejected": [says("4")]})
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: chosen and rejected answer different prompts$"):
        load_preferences(source, tokenizers["qwen3"], data, 512, "data.train", "dpo.max_tokens")
    begun = [says(None, tool_calls=[CALL]), RESULT]
    written(source.path, {"prompt": [USER], "chosen": [*begun, says("5.5")], "rejected": [*begun, says("4")]})
    [pair] = load_preferences(source, tokenizers["chatml"], data, 512, "data.train", "dpo.max_tokens")
    read = tokenizers["chatml"].decode(pair.chosen.tokens[: pair.chosen.prompt_length])
    assert read == tokenizers["chatml"].apply_chat_template([USER, *begun], tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("name", "row", "line"),
    [
        ("chatml", chat({"role": "human", "content": "a"}, says("4")), f"message 0: {LEFT_OUT} what the role 'human' says"),
        ("chatml", chat({"role": "User", "content": "2?"}, says("4")), f"message 0: {LEFT_OUT} what the role 'User' says"),
        ("chatml", chat(USER, says("a"), {"role": "function", "content": "s"}, says("4")), "message 2: .* what the role 'function' says"),
        ("chatml", chat(USER, {"role": "gpt", "content": "4"}), "the conversation has no message of the assistant's: its roles are gpt"),
        ("chatml", chat(USER, says("4", reasoning_content="It is")), f"message 1: {LEFT_OUT} its reasoning_content"),
        ("chatml", chat(USER, says("4", thinking="It is")), f"message 1: {LEFT_OUT} its thinking"),
        ("chatml", chat(USER, says("4", function_call=CALL["function"])), "message 1 has function_call, which is not taken; .*"),
        ("chatml", chat(USER, says("4", weight=0.5)), "message 1: weight=0.5: only 0 and 1 are taken, .*"),
        ("chatml", chat({**USER, "weight": 1}, says("4")), "message 0: weight=1: .*"),
        ("chatml", chat(USER, says("", tool_calls=[])), "message 1, the last, is empty"),
        ("chatml", chat(USER, says(""), USER, says("4")), "message 1: the assistant says nothing"),
        ("chatml", chat(USER, says(None, tool_calls=[{"function": {}}])), "message 1: tool_calls must be a list of calls, .*"),
        ("chatml", chat(USER, says("4"), tools="add"), "tools: 'add' is not JSON: .*"),
        ("chatml", chat(USER, says("4"), tools=[1]), r"tools must be a list of schemas, or one as JSON, not \[1\]"),
        ("chatml", chat(USER, says("4"), chat_template_kwargs=[1]), r"chat_template_kwargs: must be a mapping, .* not \[1\]"),
        ("llama3", chat(USER, says("4"), tools=TOOLS), f"tools: {LEFT_OUT} the schemas"),
        ("llama3", chat(USER, says("Let me", tool_calls=[CALL])), f"message 1: {LEFT_OUT} what the role 'assistant' says"),
        ("bare", chat(USER, says(None, tool_calls=[CALL])), f"message 1: {LEFT_OUT} its tool_calls"),
        (
            "gemma",
            chat({"role": "system", "content": "s"}, USER, says("4")),
            "the model's chat template refuses the conversation: alternate",
        ),
        ("r1", chat(USER, says("4")), rf"message 1: {WRITES} '4<\|end\|>' where the model reads '<think>\\n' .* no </think>"),
        ("r1", chat(USER, says("4", reasoning_content="It is")), f"message 1: {LEFT_OUT} its reasoning_content"),
        (
            "qwen3",
            chat(USER, says("4", reasoning_content="It is"), chat_template_kwargs={"enable_thinking": False}),
            f"message 1: {WRITES} 'It is.*' where the model reads '.*</think>.*' before it speaks",
        ),
    ],
)
def test_a_row_of_which_something_would_be_lost_is_refused(
    name: str, row: Row, line: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.train\.path: .*a\.jsonl:2: {line}$"):
        conversations(tmp_path, tokenizers[name], {"messages": [USER, says("<think>\n\n</think>\n\n4")]}, row)


def test_a_template_that_drops_a_part_of_a_text_is_refused(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    short = dressed(tokenizers["chatml"], "chatml")
    for old, line in (
        ("m.content + '<", "message 0: .* a part of what the role 'user' says"),
        ("(m.content or '')", "message 1: .* its content: '5"),
    ):
        short.chat_template = TEMPLATES["chatml"].replace(old, old.replace("m.content", "m.content[:40]"))
        with pytest.raises(ConfigError, match=line):
            conversations(tmp_path, short, {"messages": [{"role": "user", "content": "2 + 2? " * 9}, says("5 " * 30)]})
    short.chat_template = TEMPLATES["phi3"].replace("{%- if add_generation_prompt -%}", "").partition("{%- else")[0]
    with pytest.raises(ConfigError, match=r"^data\.chat: the chat template always ends with '.*', even where the assistant does not speak"):
        conversations(tmp_path, short, {"messages": [USER, says("4")]})


def test_arguments_and_tools_reach_every_rendering(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, off = tokenizers["qwen3"], {"enable_thinking": False}
    row = {"messages": [USER, says("4")], "prompt": "2 + 2?", "answer": "4", "chosen": "4", "rejected": "5", "tools": TOOLS}
    read = tokenizer.apply_chat_template([USER], tools=TOOLS, tokenize=False, add_generation_prompt=True, **off)
    assert read.endswith("<think>\n\n</think>\n\n")
    for own, args in (
        ({"chat_template_kwargs": off}, {"enable_thinking": True}),
        ({"chat_template_kwargs": json.dumps(off)}, {}),
        ({}, off),
    ):
        path = written(tmp_path / "b.jsonl", {**row, **own})
        data: dict[str, Any] = {"template_args": args}
        source, pairs = FileSource(path=path, answer_key="answer"), PreferenceSource(path=path)
        [prompt] = load_prompts(source, tokenizer, SourceFormat(**data), 512, "data.train")
        assert tokenizer.decode(prompt.tokens) == read and prompt.meta["tools"] == TOOLS
        [response] = load_answers(source, tokenizer, SftData(train=source, **data), 512, "data.train")
        format_ = PreferenceData(train=pairs, eval=pairs, **data)
        [pair] = load_preferences(pairs, tokenizer, format_, 512, "data.train", "dpo.max_tokens")
        [said] = conversations(tmp_path, tokenizer, {**row, **own}, **data)
        for sample in (response, pair.chosen, said):
            assert tokenizer.decode(sample.tokens) == read + "4<|im_end|>"
    with pytest.raises(
        ConfigError, match=r"^data\.template_args\.enable_thinkin: the chat template reads no such argument \(did you mean 'en"
    ):
        load_prompts(source, tokenizer, SourceFormat(template_args={"enable_thinkin": False}), 512, "data.train")
    with pytest.raises(ConfigError, match=r"^data\.template_args\.tokenize: the chat template reads no such argument"):
        load_prompts(source, tokenizer, SourceFormat(template_args={"tokenize": True}), 512, "data.train")
    with pytest.raises(ConfigError, match=r"b\.jsonl:1: tools: the environment has tools of its own, and the row has others$"):
        load_prompts(source, tokenizer, SourceFormat(), 512, "data.train", tools=[{**TOOLS[0], "type": "other"}])
    with pytest.raises(ValueError, match=r"data\.template_args: data\.chat=false has no chat template"):
        SourceFormat(chat=False, template_args=off)


def test_columns_that_nothing_uses_are_named(tokenizers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "messages": [{"role": "narrator", "content": "Once"}, {**USER, "mood": "good"}, says("4")],
        "chat_template_kwargs": {"x": 1},
        "id": 7,
    }
    assert len(conversations(tmp_path, tokenizers["llama3"], row, row)) == 2
    assert capsys.readouterr().err.splitlines() == [
        "megarl: data.train: columns that nothing uses: id",
        "megarl: data.train: unusual roles: narrator",
        "megarl: data.train: arguments that the chat template does not read: x",
        "megarl: data.train: keys of messages that the chat template leaves out: mood",
    ]


def test_null_keys_filled_in_by_arrow_are_left_out(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """Arrow gives every message the keys of all, every call the arguments of all, and every schema the keys of all."""
    other = {"id": "b", "type": "function", "function": {"name": "sub", "arguments": {"c": "1"}}}
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {"c": {"type": "number"}}}}},
    ]
    row = {
        "messages": [
            USER,
            says("Let me", tool_calls=[CALL]),
            RESULT,
            says(None, tool_calls=[other]),
            {**RESULT, "content": "1"},
            says("4"),
        ],
        "tools": tools,
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    source = ConversationSource(path=tmp_path / "a.parquet")
    for name in ("chatml", "qwen3"):
        from_arrow = load_conversations(source, tokenizers[name], SftData(train=source), 1024, "data.train")
        assert [one.tokens.tolist() for one in from_arrow] == [
            one.tokens.tolist() for one in conversations(tmp_path, tokenizers[name], row)
        ]
        assert "null" not in tokenizers[name].decode(from_arrow[0].tokens)
    kept = conversations(
        tmp_path, tokenizers["chatml"], {"messages": [USER, says(None, tool_calls=[{"function": {"name": "f", "arguments": {"a": None}}}])]}
    )
    assert '{"a": null}' in tokenizers["chatml"].decode(kept[0].tokens), "a null that the user wrote is an argument"


def test_an_end_token_unknown_to_the_engines_is_named(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    template = load_tokenizer(tiny_model).chat_template.replace("<|end|>", "<|pad|>")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    path = written(tmp_path / "a.jsonl", chat(USER, says("4")))
    (tmp_path / "sft.yaml").write_text(
        f"name: job\nrun_dir: {tmp_path}\nmodel: {{path: {tmp_path / 'model'}, dtype: float32}}\ncluster: {{gpus: false}}\n"
        f"data: {{train: {{type: conversations, path: {path}}}}}\n"
        "sft: {steps: 1, batch_size: 1, max_tokens: 64, micro_batch_tokens: 64}\n"
    )
    check_sft(load(tmp_path / "sft.yaml", [], SftConfig))
    line = "data.chat: the chat template ends the assistant's turns with '<|pad|>', at which no engine stops: add 0 to eos_token_id in "
    assert line in capsys.readouterr().err
