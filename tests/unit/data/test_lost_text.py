"""Texts that no token would hold: messages after the last learned one, characters outside the vocabulary, reasoning of earlier turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megarl.config import ConfigError, ConversationSource, FileSource, PreferenceData, PreferenceSource, SftData, SourceFormat
from megarl.data.preferences import load_preferences
from megarl.data.shown import row_lines
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_answers, load_conversations
from megarl.data.tokenizer import unknown_characters
from tests.unit.data.test_rendering import CALL, RESULT, TOOLS, USER, Row, chat, conversations, learned, says
from tests.unit.data.written import written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LACKS = "has characters that the tokenizer does not have"


def load(kind: str, row: Row, tokenizer: Any, path: Path, **data: Any) -> Any:
    """Load a row as one of the kinds of data."""
    path = written(path / "a.jsonl", row)
    file, pairs, talks = FileSource(path=path, answer_key="answer"), PreferenceSource(path=path), ConversationSource(path=path)
    loaders: dict[str, Callable[[], Any]] = {
        "conversations": lambda: load_conversations(talks, tokenizer, SftData(train=talks, **data), 512, "data.train"),
        "answers": lambda: load_answers(file, tokenizer, SftData(train=file, **data), 512, "data.train"),
        "prompts": lambda: load_prompts(file, tokenizer, SourceFormat(**data), 512, "data.train"),
        "pairs": lambda: load_preferences(
            pairs, tokenizer, PreferenceData(train=pairs, eval=pairs, **data), 512, "data.train", "dpo.max_tokens"
        ),
    }
    return loaders[kind]()


@pytest.mark.parametrize(
    ("name", "tail", "line"),
    [
        ("chatml", [USER, {"role": "gpt", "content": "5"}], "message 3: the chat template leaves out what the role 'gpt' says"),
        ("chatml", [{"role": "human", "content": "5"}], "message 2: the chat template leaves out what the role 'human' says"),
        (
            "chatml",
            [{"role": "User", "content": "5"}, says("5", weight=0)],
            "message 2: the chat template leaves out what the role 'User' .*",
        ),
        ("chatml", [USER, says("5", weight=0, thinking="So")], "message 3: the chat template leaves out its thinking"),
        ("gemma", [USER, USER], "the model's chat template refuses the conversation: alternate"),
    ],
)
def test_what_the_template_leaves_out_is_refused_after_the_last_learned_message(
    name: str, tail: list[Row], line: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    row, good = chat(USER, says("4"), *tail), chat(USER, says("4"))
    with pytest.raises(ConfigError, match=rf"^data\.train\.path: .*a\.jsonl:2: {line}$"):
        conversations(tmp_path, tokenizers[name], good, row)
    assert len(conversations(tmp_path, tokenizers[name], good, row, on_bad_row="drop")) == 1


@pytest.mark.parametrize(
    ("tail", "shown"),
    [
        ([{"role": "user", "content": "So?\nWhy?"}], ["user: So?", "Why?"]),
        ([RESULT], ["tool: 5.5"]),
        ([{"role": "narrator", "content": "End"}], ["narrator: End"]),
        ([USER, says("5", weight=0)], ["user: 2 + 2?", "assistant: 5"]),
    ],
)
def test_messages_that_nothing_reads_are_counted_and_shown(
    tail: list[Row], shown: list[str], tokenizers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, short = tokenizers["llama3"], chat(USER, says("4"))
    samples = conversations(tmp_path, tokenizer, short, chat(USER, says("4"), *tail), chat(USER, says("4"), *tail))
    assert {tuple(sample.tokens.tolist()) for sample in samples} == {tuple(samples[0].tokens.tolist())}, "and no token is another"
    first = f"data.train.path: {tmp_path / 'a.jsonl'}:2"
    lines = capsys.readouterr().err.splitlines()
    assert f"megarl: data.train: 2 rows have messages after the last one that is learned, which nothing reads, the first {first}" in lines
    assert ("megarl: data.train: unusual roles: narrator" in lines) == (tail[0]["role"] == "narrator")
    assert [[text for kind, text in row_lines(tokenizer, [sample]) if kind == "unread"] for sample in samples] == [[], shown, shown]


def test_what_nothing_reads_is_shown_once_where_a_row_has_several_samples(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    row = chat(USER, says("4", reasoning_content="Sum"), USER, says("5", reasoning_content="No"), {"role": "user", "content": "So?"})
    samples = conversations(tmp_path, tokenizers["qwen3"], row)
    assert len(samples) == 2 and [sample.unread for sample in samples] == ["", "user: So?"]
    assert learned(tokenizers["qwen3"], samples)[1] == ["<think>\nNo\n</think>\n\n5<|im_end|>"]


STRANGE = {"role": "user", "content": "na\u00efve \u65e5\u672c \u65e5"}  # "naïve 日本 日"
LACKED = "'\u00ef\u65e5\u672c'"
UNKNOWN: list[tuple[str, Row, str]] = [
    ("conversations", chat(USER, says("\u65e5")), f"message 1: its content {LACKS}: '\u65e5'"),
    ("conversations", chat(STRANGE, says("4"), USER, says("5")), f"message 0: its content {LACKS}: {LACKED}"),
    ("conversations", chat(USER, says("4", reasoning_content="\u65e5")), f"message 1: its reasoning_content {LACKS}: '\u65e5'"),
    (
        "conversations",
        chat(USER, says("4", reasoning_content="\u65e5"), USER, says("4")),
        f"message 1: its reasoning_content {LACKS}: '\u65e5'",
    ),
    (
        "conversations",
        chat(USER, says(None, tool_calls=[{"function": {"name": "f", "arguments": {"a": ["\u65e5"]}}}])),
        f"message 1: its tool_calls {LACKS}: '\u65e5'",
    ),
    (
        "conversations",
        chat(USER, says(None, tool_calls=[CALL]), {**RESULT, "content": "5\r\n"}, says("5")),
        rf"message 2: its content {LACKS}: '\\r'",
    ),
    ("conversations", chat(USER, says("4"), tools=[{**TOOLS[0], "type": "\u65e5"}]), f"tools {LACKS}: '\u65e5'"),
    ("answers", {"prompt": "2?", "answer": "\u65e5"}, f"message 1: its content {LACKS}: '\u65e5'"),
    ("prompts", {"prompt": STRANGE["content"], "answer": "4"}, f"message 0: its content {LACKS}: {LACKED}"),
    ("prompts", {"prompt": [USER, says("\u65e5"), USER], "answer": "4"}, f"message 1: its content {LACKS}: '\u65e5'"),
    ("pairs", {"prompt": "2?", "chosen": "\u65e5", "rejected": "\u672c"}, f"chosen: message 1: its content {LACKS}: '\u65e5'"),
    ("pairs", {"prompt": "2?", "chosen": "4", "rejected": "\u672c"}, f"rejected: message 1: its content {LACKS}: '\u672c'"),
]
PLAIN: list[tuple[str, Row, str]] = [
    ("answers", {"prompt": "2?", "answer": "\u65e5"}, f"the response {LACKS}: '\u65e5'"),
    ("answers", {"prompt": "\u65e5", "answer": "4"}, f"the prompt {LACKS}: '\u65e5'"),
    ("prompts", {"prompt": STRANGE["content"], "answer": "4"}, f"the prompt {LACKS}: {LACKED}"),
    ("pairs", {"prompt": "2?", "chosen": "4", "rejected": "\u672c"}, f"rejected {LACKS}: '\u672c'"),
]


@pytest.mark.parametrize(("kind", "row", "line", "through"), [*((*case, True) for case in UNKNOWN), *((*case, False) for case in PLAIN)])
def test_characters_that_the_tokenizer_does_not_have_are_refused_by_name(
    kind: str, row: Row, line: str, through: bool, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.train\.path: .*a\.jsonl:1: {line}$"):
        load(kind, row, tokenizers["qwen3"], tmp_path, chat=through)
    with pytest.raises(ConfigError, match=rf"^data\.train: nothing is left: 1 are left out, 1 of them as this one: .*{line}$"):
        load(kind, row, tokenizers["qwen3"], tmp_path, chat=through, on_bad_row="drop")


def test_an_unknown_token_that_the_user_has_spelled_is_one(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    [sample] = conversations(tmp_path, tokenizers["qwen3"], chat(USER, says("<|unk|>")))
    assert tokenizers["qwen3"].decode(sample.tokens).endswith("<|unk|><|im_end|>")


def letters(kind: str) -> PreTrainedTokenizerBase:
    """A tokenizer of single letters."""
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "</s>", *map(chr, range(33, 127)), "\n", "\u2581", "\u00e9"]
    if kind == "bytes":
        names += [f"<0x{number:02X}>" for number in range(256)]
    unknown = None if kind == "drops" else "<unk>"
    tokenizer = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], unk_token=unknown, byte_fallback=kind == "bytes")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    parts = [decoders.ByteFallback(), decoders.Fuse()] if kind == "bytes" else []
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="always"), *parts])
    if kind == "composes":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **({"unk_token": "<unk>"} if kind == "named" else {}))


@pytest.mark.parametrize("kind", ["named", "nameless", "drops", "composes", "bytes"])
def test_unknown_characters_are_found_in_every_kind_of_vocabulary(kind: str) -> None:
    tokenizer = letters(kind)
    assert unknown_characters(tokenizer, "plain, \u00e9 <unk></s>\n") == ""
    lacked = "" if kind == "bytes" else "\t\u65e5\U0001f600"
    assert unknown_characters(tokenizer, "k\t\u65e5 and \u65e5\U0001f600") == ("\u65e5\U0001f600" if kind == "drops" else lacked), kind
    assert unknown_characters(tokenizer, "e\u0301") == ("" if kind in ("composes", "bytes") else "\u0301")


EARLIER = [USER, says("4", reasoning_content="Deep"), USER]
HISTORIES: list[tuple[str, Row, dict[str, Any]]] = [
    ("conversations", chat(*EARLIER, says("4")), {"train_on": "last"}),
    ("conversations", chat(USER, says("4", reasoning_content="Deep", weight=0), USER, says("4")), {}),
    ("answers", {"prompt": EARLIER, "answer": "4"}, {}),
    ("prompts", {"prompt": EARLIER, "answer": "4"}, {}),
    ("pairs", {"prompt": EARLIER, "chosen": "4", "rejected": "5"}, {}),
]


@pytest.mark.parametrize(("kind", "row", "data"), HISTORIES)
def test_earlier_reasoning_is_named_where_the_template_never_writes_any(
    kind: str, row: Row, data: dict[str, Any], tokenizers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, named in (("llama3", True), ("chatml", True), ("qwen3", False)):  # Qwen3 writes it, of the last turn
        [item] = load(kind, row, tokenizers[name], tmp_path, **data)
        tokens = item.chosen.tokens if kind == "pairs" else item.tokens
        assert "Deep" not in tokenizers[name].decode(tokens)
        line = "megarl: data.train: keys of messages that the chat template leaves out: reasoning_content"
        assert (line in capsys.readouterr().err.splitlines()) == named, name
