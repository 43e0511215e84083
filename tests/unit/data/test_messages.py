"""Keys of messages, arguments of calls, and prompts of pairs: each is read as it was written, named or refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megarl.config import ConfigError, ConversationSource, FileSource, PreferenceData, PreferenceSource, SftData, SourceFormat
from megarl.data.preferences import load_preferences
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_answers, load_conversations
from tests.unit.data.templates import TEMPLATES, dressed
from tests.unit.data.test_rendering import USER, Row, conversations, learned, says
from tests.unit.data.written import written

LEFT_OUT = "megarl: data.train: keys of messages that the chat template leaves out: "
SYSTEM = {"role": "system", "content": "Be brief"}


def calls(*arguments: Any, **more: Any) -> Row:
    """A message of the assistant's with a call for each of the arguments."""
    return says(None, tool_calls=[{"type": "function", "function": {"name": "add", "arguments": one, **more}} for one in arguments])


def loaded(kind: str, path: Path, tokenizer: Any, prompt: Row, response: Row) -> int:
    """Load one row in which these messages are a prompt and the response to it; return the number of items."""
    rows: dict[str, Row] = {
        "conversations": {"messages": [prompt, response]},
        "answers": {"prompt": [prompt], "answer": [response]},
        "prompts": {"prompt": [prompt], "answer": "4"},
        "pairs": {"prompt": [prompt], "chosen": [response], "rejected": [says("5")]},
    }
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([rows["conversations"]]), path / "a.parquet")
        talks = ConversationSource(path=path / "a.parquet")
        return len(load_conversations(talks, tokenizer, SftData(train=talks), 512, "data.train"))
    if kind == "conversations":
        return len(conversations(path, tokenizer, rows[kind]))
    file = written(path / "a.jsonl", rows[kind])
    if kind == "pairs":
        pairs = PreferenceSource(path=file)
        return len(load_preferences(pairs, tokenizer, PreferenceData(train=pairs, eval=pairs), 512, "data.train", "dpo.max_tokens"))
    source = FileSource(path=file, answer_key="answer")
    if kind == "prompts":
        return len(load_prompts(source, tokenizer, SourceFormat(), 512, "data.train"))
    return len(load_answers(source, tokenizer, SftData(train=source), 512, "data.train"))


@pytest.mark.parametrize("kind", ["conversations", "answers", "prompts", "pairs", "parquet"])
def test_a_key_of_a_message_is_named_or_refused_whatever_its_value_is(
    kind: str, tokenizers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = {**USER, "name": "Bob", "seen": False, "images": [], "none": None}
    response = says("4", details=[{"text": "It is"}], thoughts={"a": "It is"}, prefix=True, score=0.5)
    assert loaded(kind, tmp_path, tokenizers["chatml"], prompt, response) == 1
    of_response = [] if kind == "prompts" else ["details", "prefix", "score", "thoughts"]
    [line] = [line for line in capsys.readouterr().err.splitlines() if "keys of messages" in line]
    assert line == LEFT_OUT + ", ".join(sorted(["name", "seen", *of_response]))
    for key, media in {"images": ["cat.png"], "audio": {"id": "7"}, "video": "cat.mp4"}.items():
        with pytest.raises(ConfigError, match=rf":1: .*message 0: {key} is not taken: only texts are read and learned$"):
            loaded(kind, tmp_path, tokenizers["chatml"], {**USER, key: media}, says("4"))


def test_message_keys_that_the_template_ignores_are_named(
    tokenizers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = dressed(tokenizers["chatml"], "qwen3")
    opening = "{%- for m in messages -%}{{ m.name }}{%- if m.seen -%}{{ '!' }}{%- endif -%}{%- endfor -%}"
    tokenizer.chat_template = opening + TEMPLATES["qwen3"]
    assert len(conversations(tmp_path, tokenizer, {"messages": [{**USER, "name": "Bob", "seen": True}, says("4")]})) == 1
    assert not capsys.readouterr().err
    user = {**USER, "reasoning_content": "Hm"}
    call = {**calls({"a": 1}), "reasoning_content": "Add"}
    call["tool_calls"][0]["note"] = "It is"
    row = {"messages": [user, says("4", reasoning_content="It is"), USER, call]}
    assert len(conversations(tmp_path, tokenizers["qwen3"], row)) == 2
    assert capsys.readouterr().err == f"{LEFT_OUT}reasoning_content, tool_calls.note\n"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("{town: X}", ", and '{town: X}' is not: Expecting property name"),
        ('{"a": 1, "a": 2}', ", and .* is not: 'a' is there twice"),
        ('["x"]', """, not '\\["x"\\]'"""),
        (["x"], r", not \['x'\]"),
        ('"{}"', """, not '"{}"'"""),
        ("null", ", not 'null'"),
        (3, ", not 3"),
        ({"a": float("nan")}, r", and {'a': nan} is not: .*"),
        ('{"a": Infinity}', ", and .* is not: .*"),
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments: Any, fault: str, tokenizers: dict[str, Any], tmp_path: Path) -> None:
    line = rf"a\.jsonl:2: message 1: tool_calls: the arguments of 'add' must be an object, or one as JSON{fault}"
    for name in ("chatml", "llama3", "r1"):
        with pytest.raises(ConfigError, match=line):
            conversations(tmp_path, tokenizers[name], {"messages": [USER, says("4")]}, {"messages": [USER, calls({}, arguments)]})


def test_a_call_without_arguments_has_an_empty_object(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    bare = says("", tool_calls=[{"type": "function", "function": {"name": "add"}}])
    rows = [{"messages": [USER, message]} for message in (calls(""), calls(None), calls({}), calls(" "), calls("{}"), bare)]
    wanted = {
        "chatml": '<tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>',
        "llama3": "add{}<|eot_id|>",
    }
    for name, text in wanted.items():
        assert learned(tokenizers[name], conversations(tmp_path, tokenizers[name], *rows)) == [[text]] * len(rows)
    named = says("", tool_calls=[{"name": "add", "parameters": {"a": 1}}])
    with pytest.raises(ConfigError, match=r"message 1: tool_calls: the call of 'add' has parameters and no arguments$"):
        conversations(tmp_path, tokenizers["chatml"], {"messages": [USER, named]})


def test_arguments_keep_their_digits(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """Where the template takes JSON, its text is kept; Parquet's float32 is the number that was written, and its map is an object."""
    tokenizer, wrapped = tokenizers["chatml"], '<tool_call>{"name": "add", "arguments": %s}</tool_call><|im_end|>'
    text = '{"a": 1.10, "b": 1E3, "c": 0.12345678901234567890123}'
    [sample] = conversations(tmp_path, tokenizer, {"messages": [USER, calls(text)]})
    assert learned(tokenizer, [sample]) == [[wrapped % text]]
    number, texts = pyarrow.float32(), pyarrow.string()
    columns: list[tuple[pyarrow.DataType, Any, str]] = [
        (pyarrow.struct({"a": number}), {"a": 0.1}, '{"a": 0.1}'),
        (pyarrow.struct({"a": pyarrow.list_(pyarrow.struct({"b": pyarrow.float16()}))}), {"a": [{"b": 0.1}]}, '{"a": [{"b": 0.1}]}'),
        (pyarrow.map_(texts, number), [("a", 0.1), ("b", 0.7)], '{"a": 0.1, "b": 0.7}'),
    ]
    path = tmp_path / "a.parquet"
    for kind, value, wanted in columns:
        function = pyarrow.struct({"name": texts, "arguments": kind})
        message = pyarrow.struct({"role": texts, "content": texts, "tool_calls": pyarrow.list_(pyarrow.struct({"function": function}))})
        rows = pyarrow.array([[USER, calls(value)]], pyarrow.list_(message))
        parquet.write_table(pyarrow.table({"messages": rows}), path)
        source = ConversationSource(path=path)
        made = load_conversations(source, tokenizer, SftData(train=source), 512, "data.train")
        assert learned(tokenizer, made) == [[wrapped % wanted]]


def test_the_prompt_of_a_pair_is_read_whole_or_refused(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, path = tokenizers["chatml"], tmp_path / "a.jsonl"
    other = {"role": "user", "content": "3 + 3?"}

    def read(prompt: Any, *before: Row) -> str:
        row = {"prompt": prompt, "chosen": [*before, says("4")], "rejected": [*before, says("5")]}
        source = PreferenceSource(path=written(path, row))
        data = PreferenceData(train=source, eval=source)
        [pair] = load_preferences(source, tokenizer, data, 512, "data.train", "dpo.max_tokens")
        text: str = tokenizer.decode(pair.chosen.tokens[: pair.chosen.prompt_length])
        return text

    def rendered(*messages: Row) -> str:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text

    assert read("2 + 2?", USER) == read([USER], USER) == rendered(USER)
    assert read(" 2 + 2?\n", SYSTEM, USER) == read([USER], SYSTEM, USER) == read([SYSTEM], SYSTEM, USER) == rendered(SYSTEM, USER)
    assert read([SYSTEM, USER], USER) == rendered(SYSTEM, USER)
    assert read([SYSTEM, other, says("6"), USER], USER) == rendered(SYSTEM, other, says("6"), USER)
    assert read([SYSTEM, other], other, says("6"), USER) == rendered(SYSTEM, other, says("6"), USER)
    for prompt in ("3 + 3?", [other], [SYSTEM, other], [SYSTEM], [USER, says("4"), other]):
        with pytest.raises(ConfigError, match=r"a\.jsonl:1: prompt: chosen and rejected begin with messages of their own, which do not"):
            read(prompt, USER)


def test_empty_lines_at_the_end_of_a_file_are_no_rows(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    line = json.dumps({"messages": [USER, says("4")]})
    source = ConversationSource(path=tmp_path / "a.jsonl")
    for ending in ("", "\n", "\n\n", "\n \r\n\n"):
        source.path.write_text(line + ending)
        assert len(load_conversations(source, tokenizers["chatml"], SftData(train=source), 512, "data.train")) == 1
    source.path.write_text(f"{line}\n\n\n{line}\n\n")
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*a\.jsonl:2: empty line$"):
        load_conversations(source, tokenizers["chatml"], SftData(train=source), 512, "data.train")


def test_end_tokens_at_the_end_of_a_response_are_one(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, end = tokenizers["chatml"], "<|im_end|>"
    rows = [{"messages": [USER, says(f"4{ends}")]} for ends in ("", end, 2 * end, f"{end}\n{end}\n")]
    assert learned(tokenizer, conversations(tmp_path, tokenizer, *rows)) == [[f"4{end}"]] * len(rows)


@pytest.mark.parametrize(
    "written_as", [json.dumps, str, lambda chat: f" {json.dumps(chat, indent=1)}\n"], ids=["json", "python", "indented"]
)
@pytest.mark.parametrize("kind", ["prompts", "prompts-raw", "answers", "chosen", "conversations"])
def test_chat_messages_in_a_text_are_not_one_message(kind: str, written_as: Any, tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """CSV and some Parquet files have them so, and a whole chat would be what one user says."""
    chat, tokenizer = written_as([{"role": "user", "content": "2 + 2?"}]), tokenizers["chatml"]
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*rows\.jsonl:1: .*(is a text that holds chat messages|not a text)"):
        match kind:
            case "prompts" | "prompts-raw":
                source = FileSource(path=written(path, {"prompt": chat, "answer": "4"}), answer_key="answer")
                load_prompts(source, tokenizer, SourceFormat(chat=kind == "prompts"), 256, "data.train")
            case "answers":
                source = FileSource(path=written(path, {"prompt": "2 + 2?", "answer": chat}), answer_key="answer")
                load_answers(source, tokenizer, SftData(train=source), 256, "data.train")
            case "chosen":
                pairs = PreferenceSource(path=written(path, {"prompt": "2 + 2?", "chosen": chat, "rejected": "5"}))
                load_preferences(pairs, tokenizer, PreferenceData(train=pairs, eval=pairs), 256, "data.train", "dpo.max_tokens")
            case _:
                conversation = ConversationSource(path=written(path, {"messages": chat}))
                load_conversations(conversation, tokenizer, SftData(train=conversation), 256, "data.train")


def test_a_question_about_messages_is_a_prompt(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    chat = json.dumps([{"role": "user", "content": "2 + 2?"}])
    for text in (f"{chat} What is asked?", f"What is asked? {chat}", '[{"name": "add"}]', "[1, 2]"):
        source = FileSource(path=written(tmp_path / "rows.jsonl", {"prompt": text, "answer": "4"}), answer_key="answer")
        assert [prompt.text for prompt in load_prompts(source, tokenizers["chatml"], SourceFormat(), 256, "data.train")] == [text]
