"""Rows that are refused, left out or only named; control tokens inside texts and at their ends."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megarl.config import ConfigError, ConversationSource, FileSource, PreferenceData, PreferenceSource, SftData, SourceFormat
from megarl.data import large
from megarl.data.preferences import load_preferences
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_answers, load_conversations
from megarl.data.tokenizer import load_tokenizer
from tests.unit.data.templates import TEMPLATES, dressed
from tests.unit.data.test_rendering import TOOLS, USER, Row, conversations, says
from tests.unit.data.written import written


def test_on_bad_row_drop_leaves_bad_rows_out_and_shows_them(
    tokenizers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, good = tokenizers["chatml"], {"messages": [USER, says("4")]}
    bad: list[Row] = [{"messages": [{"role": "human", "content": "a"}, says("4")]}, {"messages": 3}, {}, {"messages": [USER]}]
    samples = conversations(tmp_path, tokenizer, good, *bad, good, on_bad_row="drop")
    assert len(samples) == 2
    [line, _] = capsys.readouterr().err.splitlines()
    assert line.startswith("megarl: data.train: 4 bad rows are left out (data.on_bad_row=drop): data.train.path: ")
    assert line.count("a.jsonl:") == 3 and line.endswith("a.jsonl:5: the conversation has no message of the assistant's; ...")
    with pytest.raises(ConfigError, match=r"^data\.train: nothing is left: 1 are left out, 1 of them as this one: .*a\.jsonl:1: message 0"):
        conversations(tmp_path, tokenizer, bad[0], on_bad_row="drop")
    pairs = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": 3, "rejected": "b"},
    ]
    source = PreferenceSource(path=written(tmp_path / "p.jsonl", *pairs))
    data = PreferenceData(train=source, eval=source, on_bad_row="drop")
    assert len(load_preferences(source, tokenizer, data, 512, "data.train", "dpo.max_tokens")) == 1
    assert "2 bad rows are left out" in capsys.readouterr().err
    answers = [
        {"prompt": "a", "answer": "b"},
        {"prompt": [{"role": "human", "content": "a"}], "answer": "b"},
        {"prompt": "c"},
        {"prompt": "d", "answer": "b"},
    ]
    prompts = FileSource(path=written(tmp_path / "q.jsonl", *answers), answer_key="answer")
    kept = load_prompts(prompts, tokenizer, SourceFormat(on_bad_row="drop"), 512, "data.train")
    assert [(prompt.id, prompt.text) for prompt in kept] == [(0, "a"), (1, "d")]
    assert "2 bad rows are left out" in capsys.readouterr().err
    assert len(load_answers(prompts, tokenizer, SftData(train=prompts, on_bad_row="drop"), 512, "data.train")) == 2


def test_a_line_that_is_no_row_is_a_bad_row_of_every_kind_of_data(
    tokenizers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, path = tokenizers["chatml"], tmp_path / "a.jsonl"
    row = {"prompt": "a", "answer": "b", "chosen": "b", "rejected": "c", "messages": [USER, says("4")]}
    lines = ['{"prompt": ', "[1]", "", json.dumps(row), '{"prompt": "\xe9"}', json.dumps(row), '{"half']
    path.write_bytes("\n".join(lines).encode("latin-1"))
    source, pairs, talks = FileSource(path=path, answer_key="answer"), PreferenceSource(path=path), ConversationSource(path=path)
    kinds: list[tuple[str, Any]] = [
        (
            "prompts",
            lambda on, **cut: load_prompts(source.model_copy(update=cut), tokenizer, SourceFormat(on_bad_row=on), 512, "data.train"),
        ),
        ("answers", lambda on, **cut: load_answers(source, tokenizer, SftData(train=source, on_bad_row=on), 512, "data.train")),
        ("talks", lambda on, **cut: load_conversations(talks, tokenizer, SftData(train=talks, on_bad_row=on), 512, "data.train")),
        (
            "pairs",
            lambda on, **cut: load_preferences(
                pairs, tokenizer, PreferenceData(train=pairs, eval=pairs, on_bad_row=on), 512, "data.train", "dpo.max_tokens"
            ),
        ),
    ]
    for kind, load in kinds:
        assert len(load("drop")) == 2, kind
        [line, *_] = [line for line in capsys.readouterr().err.splitlines() if "bad rows" in line]
        assert line.startswith("megarl: data.train: 5 bad rows are left out (data.on_bad_row=drop): data.train.path: "), kind
        assert re.search(
            r"a\.jsonl:1: not JSON: .*; .*a\.jsonl:2: must hold an object, not list; .*a\.jsonl:3: empty line; \.\.\.$", line
        ), kind
        with pytest.raises(ConfigError, match=r"^data\.train\.path: .*a\.jsonl:1: not JSON: "):
            load("refuse")
    load = dict(kinds)["prompts"]
    assert len(load("drop", skip=3, rows=2)) == 1, "it counts as a row"
    assert "1 bad row is left out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^data\.train: nothing is left: 3 are left out, 3 of them as this one: .*a\.jsonl:1: not JSON"):
        load("drop", rows=3)


def test_a_bad_row_of_a_large_file_does_not_end_the_run(
    tokenizers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picky = dressed(tokenizers["chatml"], "chatml")
    picky.chat_template = "{%- if '5' in messages[0].content -%}{{ raise_exception('no 5') }}{%- endif -%}" + TEMPLATES["chatml"]
    rows: list[Row] = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": "1"} for n in range(64)]
    rows[20]["prompt"], rows[30]["prompt"] = [{"role": "human", "content": "a"}], []
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    monkeypatch.setattr(large, "LARGE", 50)
    monkeypatch.setattr(large, "SAMPLED", 4)
    source = FileSource(path=tmp_path / "a.parquet", answer_key="answer")
    prompts = load_prompts(source, picky, SourceFormat(on_bad_row="drop"), 512, "data.train")
    assert isinstance(prompts, large.LargeFile) and len(prompts) == 62
    assert "megarl: data.train: 2 bad rows are left out (data.on_bad_row=drop): " in capsys.readouterr().err
    drawn = prompts[4:7]  # the template refuses the second, which was not read before
    assert [(prompt.id, prompt.text) for prompt in drawn] == [(4, "4?"), (5, "6?"), (6, "6?")]
    assert "a row is left out as it is drawn, and the next takes its place: " in capsys.readouterr().err
    assert len(list(prompts)) == 62
    refusing = load_prompts(
        source.model_copy(update={"rows": 55, "skip": 0}), tokenizers["llama3"], SourceFormat(on_bad_row="drop"), 512, "data.train"
    )
    assert refusing[20].given == rows[20]["prompt"], "which this template renders"


@pytest.mark.parametrize("kind", ["jsonl", "large"])
def test_control_tokens_inside_texts_are_counted_or_refused(
    kind: str, tokenizers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizers["chatml"]
    rendered = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    rows = [{"prompt": rendered if n in (21, 40) else f"{n}?", "answer": "1"} for n in range(64)]
    if kind == "large":
        monkeypatch.setattr(large, "LARGE", 50)
        monkeypatch.setattr(large, "SAMPLED", 4)
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    path = tmp_path / "a.parquet" if kind == "large" else written(tmp_path / "a.jsonl", *rows)
    source = FileSource(path=path, answer_key="answer")
    assert len(load_prompts(source, tokenizer, SourceFormat(), 512, "data.train")) == 64
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "megarl: data.train: 2 rows have control tokens inside their texts, the first '<|im_start|>' in data.train.path: "
    )
    assert f"{path}:22 (data.control_tokens=allow)" in line
    with pytest.raises(
        ConfigError, match=r":22: message 0: its content has the control token '<\|im_start\|>' \(data\.control_tokens=refuse\)$"
    ):
        load_prompts(source, tokenizer, SourceFormat(control_tokens="refuse"), 512, "data.train")
    dropping = SourceFormat(control_tokens="refuse", on_bad_row="drop", system="Be brief <|im_end|>")
    assert len(load_prompts(source, tokenizer, dropping, 512, "data.train")) == 62, "the run's own system message is not a row's"


def test_a_plain_text_has_one_bos_and_one_end_token(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = dressed(tokenizers["llama3"], "llama3")
    tokenizer._add_eos_token = True
    tokenizer.add_bos_token = True
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id and tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in (("2?", "4"), ("<|bos|>2?", "4<|eot_id|>"), ("2?", "4<|eot_id|>\n"))]
    source = FileSource(path=written(tmp_path / "a.jsonl", *rows), answer_key="answer")
    for template in ("{prompt}", "<|bos|>{prompt}"):
        data = SftData(train=source, chat=False, template=template)
        for prompt, sample in zip(
            load_prompts(source, tokenizer, SourceFormat(chat=False, template="{prompt}"), 64, "data.train"),
            load_answers(source, tokenizer, data.model_copy(update={"template": "{prompt}"}), 64, "data.train"),
            strict=True,
        ):
            assert tokenizer.decode(prompt.tokens) == "<|bos|>2?" and tokenizer.decode(sample.tokens) == "<|bos|>2?4<|eot_id|>"
    thinking = SftData(train=source, chat=False, template="{prompt}<think>\n")
    written(source.path, {"prompt": "2?", "answer": "<think>\nIt is</think>4"})
    [sample] = load_answers(source, tokenizer, thinking, 64, "data.train")
    assert tokenizer.decode(sample.tokens) == "<|bos|>2?<think>\nIt is</think>4<|eot_id|>"
    written(source.path, {"prompt": "2?", "answer": "4", "tools": TOOLS})
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the column tools needs data\.chat=true$"):
        load_prompts(source, tokenizer, SourceFormat(chat=False), 64, "data.train")


def test_a_tokenizer_begins_texts_as_its_configuration_says(tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """transformers ignores add_bos_token beside tokenizer.json, and DeepSeek's tokenizers have it nowhere else."""
    tokenizers["r1"].save_pretrained(tmp_path)
    for begins in (False, True):
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": begins}))
        loaded = load_tokenizer(tmp_path)
        source = FileSource(path=written(tmp_path / "a.jsonl", {"prompt": "2?", "answer": "4"}), answer_key="answer")
        [prompt] = load_prompts(source, loaded, SourceFormat(chat=False), 64, "data.train")
        assert loaded.decode(prompt.tokens) == ("<|bos|>2?" if begins else "2?")
        [chat] = load_prompts(source, loaded, SourceFormat(), 64, "data.train")
        assert loaded.decode(chat.tokens) == "<|bos|><|user|>2?<|assistant|><think>\n", "the template begins its own text"
