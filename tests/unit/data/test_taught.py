"""Rows of tokens with a teacher's log-probs: what is read of them, and what is refused, with the row, the column and the numbers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import ConfigError, SftConfig, SftData, TaughtSource
from megarl.data.conversations import Conversation, sample
from megarl.data.supervised import load_demonstrations
from megarl.data.tokenizer import load_tokenizer

ROW: dict[str, Any] = {
    "prompt_ids": [5, 6, 7],
    "response_ids": [9, 2],
    "top_ids": [[9, 4], [2, 9]],
    "top_logps": [[math.log(0.5), math.log(0.25)], [0.0, math.log(1e-9)]],
}


def load(model: Path, path: Path, *rows: dict[str, Any], **data: Any) -> list[Conversation]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = TaughtSource(path=path)
    return load_demonstrations(source, load_tokenizer(model), SftData(train=source, **data), 16, "data.train")


def test_a_row_is_its_tokens_and_the_log_probs_of_the_named_and_of_all_others(tiny_model: Path, tmp_path: Path) -> None:
    [one] = load(tiny_model, tmp_path / "rows.jsonl", ROW)
    drawn = sample(one)
    assert (drawn.tokens.tolist(), drawn.prompt_length, drawn.loss_tokens) == ([5, 6, 7, 9, 2], 3, 2)
    assert one.taught is not None and one.taught.dtype == np.float32
    expected = [[9, 4, math.log(0.5), math.log(0.25), math.log(0.25)], [2, 9, 0.0, math.log(1e-9), math.log(1e-6)]]  # the least of a rest
    np.testing.assert_allclose(one.taught, expected, rtol=1e-6)
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    source = TaughtSource(path=tmp_path / "rows.parquet")
    [same] = load_demonstrations(source, load_tokenizer(tiny_model), SftData(train=source), 16, "data.train")
    assert same.taught is not None and (same.taught == one.taught).all() and (same.tokens == one.tokens).all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no column": ({"top_logps": None}, r"there is no column top_logps \(a row has prompt_ids, response_ids, top_ids, top_logps\)"),
    "a text": ({"prompt_ids": "abc"}, r"prompt_ids is not a list of token ids: 'abc'"),
    "no prompt": ({"prompt_ids": []}, r"prompt_ids is not a list of token ids: \[\]"),
    "a fraction": ({"response_ids": [9, 2.5]}, r"response_ids is not a list of token ids: \[9, 2\.5\]"),
    "a vast number": ({"response_ids": [9, 10**30]}, r"response_ids is not a list of token ids"),
    "beyond the vocabulary": ({"response_ids": [9, 10**6]}, r"response_ids has 1000000; the tokenizer's ids are 0 to \d+"),
    "negative": ({"top_ids": [[9, -1], [2, 9]]}, r"top_ids has -1; the tokenizer's ids are 0 to \d+"),
    "too few positions": ({"top_ids": [[9, 4]]}, r"top_ids has 1 positions, and response_ids 2 tokens"),
    "too many positions": ({"top_logps": [[-1, -2]] * 3}, r"top_logps has 3 positions, and response_ids 2 tokens"),
    "different numbers": ({"top_ids": [[9, 4], [2]]}, r"top_ids is not a list of lists, all as long, of token ids"),
    "fewer log-probs": ({"top_logps": [[-1], [-2]]}, r"top_ids names 2 tokens for each of the response, and top_logps 1"),
    "twice": ({"top_ids": [[9, 4], [2, 2]]}, r"top_ids names a token twice at position 1"),
    "a probability": ({"top_logps": [[-1, 0.25], [-1, -2]]}, r"top_logps has 0\.25; a log-prob is at most 0"),
    "no number": ({"top_logps": [[-1, -2], [math.nan, -2]]}, r".*(NaN|nan)"),
    "more than all": ({"top_logps": [[-1, -2], [-0.5, -0.5]]}, r"the probabilities of top_logps at position 1 sum to 1\.2131, more than 1"),
    "too long": ({"prompt_ids": [5] * 15}, r"prompt and response are 17 tokens, more than sft\.max_tokens=16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_says_something_else_is_refused(tiny_model: Path, tmp_path: Path, name: str) -> None:
    changed, line = REFUSED[name]
    row = {key: value for key, value in (ROW | changed).items() if value is not None}
    with pytest.raises(ConfigError, match=f"{line}"):
        load(tiny_model, tmp_path / "rows.jsonl", ROW, row)
    kept = load(tiny_model, tmp_path / "rows.jsonl", ROW, row, on_bad_row="drop", overlong="drop")
    assert len(kept) == 1


def test_all_rows_name_as_many_tokens(tiny_model: Path, tmp_path: Path) -> None:
    one = ROW | {"top_ids": [[9], [2]], "top_logps": [[-1.0], [-2.0]]}
    with pytest.raises(ConfigError, match=r"top_ids names 1 tokens for each of the response, and .* 2; all rows must name as many"):
        load(tiny_model, tmp_path / "rows.jsonl", ROW, one)


@pytest.mark.parametrize(
    ("kind", "distillation", "line"),
    [
        ("taught", None, r"data\.train\.type=taught: sft\.distillation is null, so that nothing reads the teacher's log-probs"),
        ("conversations", {}, r"sft\.distillation: data\.train\.type=conversations has no log-probs of a teacher; give type=taught"),
    ],
)
def test_log_probs_and_their_loss_go_together(kind: str, distillation: Any, line: str) -> None:
    given = {"name": "x", "model": {"path": "m"}, "data": {"train": {"type": kind, "path": "rows.jsonl"}}}
    with pytest.raises(ValueError, match=line):
        SftConfig.model_validate({**given, "sft": {"steps": 1, "distillation": distillation}})


@pytest.mark.parametrize(
    "unused", [{"system": "Be brief."}, {"chat": False, "template": "Q: {prompt}"}, {"control_tokens": "refuse"}, {"train_on": "last"}]
)
def test_settings_of_texts_are_refused_beside_tokens(unused: dict[str, Any]) -> None:
    data = {"train": {"type": "taught", "path": "rows.jsonl"}, **unused}
    with pytest.raises(ValueError, match=rf"data\.{[*unused][-1]}: is for texts, and rows of data\.train\.type=taught are tokens"):
        SftConfig.model_validate({"name": "x", "model": {"path": "m"}, "data": data, "sft": {"steps": 1, "distillation": {}}})
