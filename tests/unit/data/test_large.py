"""Prompts of a large file: those of a small one, made when they are asked for, and refused in the same words before the start."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyarrow import parquet

from megarl.config import ConfigError, FileSource, MixtureSource, SourceFormat
from megarl.config.data import PromptPart
from megarl.data import large
from megarl.data.sources import load_prompts
from tests.unit.data.written import ROW, save_to_disk, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "17 + 17?"}]


@pytest.mark.parametrize("prompt", ["17 + 17?", CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_a_large_file_gives_the_prompts_of_a_small_one(
    kind: str, prompt: Any, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [f"{n} + 17?" for n in range(60)]
    rows = [{**ROW, "prompt": [*prompt[:-1], {**prompt[-1], "content": text}] if isinstance(prompt, list) else text} for text in asked]
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=16)
        source = FileSource(path=tmp_path / "a.parquet", skip=3, rows=50)
    else:
        source = save_to_disk(tmp_path / "saved", rows).model_copy(update={"skip": 3, "rows": 50})
    small = load_prompts(source, tokenizer, SourceFormat(), 64, "data.train")
    monkeypatch.setattr(large, "LARGE", 50)
    read = load_prompts(source, tokenizer, SourceFormat(), 64, "data.train")
    assert isinstance(read, large.LargeFile) and len(read) == 50
    assert list(read) == [read[n] for n in range(50)] == small
    assert read[-1] == small[-1] and read[10:20:3] == small[10:20:3]
    with pytest.raises(IndexError):
        read[50]
    few = source.model_copy(update={"rows": 20})
    assert load_prompts(few, tokenizer, SourceFormat(), 64, "data.train") == small[:20], "of which no table is made"
    parts = [PromptPart(source=source, weight=1.5), PromptPart(source=write(tmp_path / "b.jsonl", ROW))]
    mixture = load_prompts(MixtureSource(parts=parts, seed=4), tokenizer, SourceFormat(), 64, "data.train")
    assert [prompt.id for prompt in mixture] == list(range(76)) and mixture[-1].text == "17 + 17?"
    assert Counter(prompt.text for prompt in mixture[:75]).total() == 75


ROWS: dict[str, dict[str, Any]] = {
    "no answer": {"reward_model": {"ground_truth": None, "style": "rule"}},
    "no struct": {"reward_model": None},
    "no prompt": {"prompt": None},
    "blank": {"prompt": [{"role": "user", "content": " \n"}]},
    "no messages": {"prompt": []},
    "no content": {"prompt": [{"role": "user", "content": None}]},
    "several turns that the template may refuse": {"prompt": [{"role": "user", "content": "a "}, {"role": "user", "content": "b " * 70}]},
    "a character that the tokenizer does not have": {"prompt": [{"role": "user", "content": "\u65e5?"}]},
    "another role": {"prompt": [{"role": "assistant", "content": "b"}]},
    "no role": {"prompt": [{"role": None, "content": "a"}, {"role": "user", "content": "b"}]},
    "an answer inside": {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "long": {"prompt": [{"role": "user", "content": "a " * 200}]},
    "one token too long": {"prompt": [{"role": "system", "content": "b"}, {"role": "user", "content": "a " * 70}]},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_a_large_file_is_refused_before_the_start_in_the_same_words(
    name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good: dict[str, Any] = {**ROW, "prompt": [{"role": "user", "content": "17 + 17?"}]}
    for place in (0, 61, 197):  # not among those that are sampled, but for the first
        rows = [good | (ROWS[name] if n == place else {}) for n in range(200)]
        parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.Table.from_pylist([good, ROWS[name]]).schema), tmp_path / "a.parquet")
        source = FileSource(path=tmp_path / "a.parquet")
        with pytest.raises(ConfigError) as small:
            load_prompts(source, tokenizer, SourceFormat(), 64, "data.train")
        with monkeypatch.context() as patch, pytest.raises(ConfigError) as read:
            patch.setattr(large, "LARGE", 50)
            patch.setattr(large, "SAMPLED", 4)
            load_prompts(source, tokenizer, SourceFormat(), 64, "data.train")
        assert str(read.value) == str(small.value) and f"a.parquet:{place + 1}" in str(small.value)


def test_invalid_utf8_in_a_large_file_is_refused_before_the_start(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pyarrow.array([b"17 + 17?"] * 150 + [b"\xff\xfe?"] + [b"17 + 17?"] * 49).view(pyarrow.string())
    answers = pyarrow.array([{"ground_truth": "34"}] * 200)
    parquet.write_table(pyarrow.table({"prompt": rows, "reward_model": answers}), tmp_path / "a.parquet")
    monkeypatch.setattr(large, "LARGE", 50)
    monkeypatch.setattr(large, "SAMPLED", 4)
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*a\.parquet is not readable: "):
        load_prompts(FileSource(path=tmp_path / "a.parquet"), tokenizer, SourceFormat(), 64, "data.train")
