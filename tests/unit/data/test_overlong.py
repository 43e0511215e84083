"""Rows that are too long are refused with their place, or left out and counted: what is left is what a file without them holds."""

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from megarl.checks.without_engines import check_sft
from megarl.config import (
    ConfigError,
    ConversationSource,
    FileSource,
    MixtureSource,
    PreferenceData,
    PreferenceSource,
    SftConfig,
    SftData,
    SourceFormat,
    load,
)
from megarl.config.data import PromptPart
from megarl.data import large
from megarl.data.preferences import load_preferences
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_answers, load_conversations
from tests.unit.data.test_preferences import plain
from tests.unit.data.written import written

DROP = SourceFormat(overlong="drop")
LONG, ENDLESS = "1 + " * 70 + "1?", "1 + " * 20_000  # the second is not even tokenised


def rows(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "reward_model": {"ground_truth": str(n)}} for n, text in enumerate(texts)]


def filled(path: Path, content: list[dict[str, Any]]) -> Path:
    if path.suffix != ".parquet":
        return written(path, *content)
    parquet.write_table(pyarrow.Table.from_pylist(content), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "large"])
def test_prompts_that_are_too_long_are_left_out_and_counted(
    kind: str,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = rows(*(LONG if n in (0, 41, 63) else ENDLESS if n == 20 else f"{n} + 1?" for n in range(64)))
    short = [row for row in given if row["prompt"].endswith(" + 1?") and len(row["prompt"]) < 20]
    suffix = "jsonl" if kind == "jsonl" else "parquet"
    source, other = (FileSource(path=filled(tmp_path / f"{n}.{suffix}", content)) for n, content in enumerate((given, short)))
    if kind == "large":
        monkeypatch.setattr(large, "LARGE", 50)
        monkeypatch.setattr(large, "SAMPLED", 4)
    with pytest.raises(ConfigError, match=rf"^data\.train\.path: .*0\.{suffix}:\d+: .*prompt.*rollout\.max_prompt_tokens=64"):
        load_prompts(source, tokenizer, SourceFormat(), 64, "data.train")
    left = load_prompts(source, tokenizer, DROP, 64, "data.train")
    said = "megarl: data.train: 4 of 64 are longer than rollout.max_prompt_tokens=64, and left out (data.overlong=drop)\n"
    assert isinstance(left, large.LargeFile) == (kind == "large") and capsys.readouterr().err == said
    assert list(left) == list(load_prompts(other, tokenizer, SourceFormat(), 64, "data.train"))
    assert [one.id for one in left] == list(range(60))
    assert left[-1].text == "62 + 1?" and left[41].text == "44 + 1?"
    parts = [PromptPart(source=source, weight=1.5), PromptPart(source=other)]
    assert len(load_prompts(MixtureSource(parts=parts), tokenizer, DROP, 64, "data.train")) == 60 + 30 + 60
    with pytest.raises(ConfigError, match=r"^data\.train: nothing is left: all 64 are longer than rollout\.max_prompt_tokens=3$"):
        load_prompts(source, tokenizer, DROP, 3, "data.train")


def test_pairs_and_conversations_that_are_too_long_are_left_out(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    bad = [{**pair, name: text} for name in pair for text in (LONG, ENDLESS)]
    source, other = (
        PreferenceSource(path=filled(tmp_path / f"{n}.jsonl", content)) for n, content in enumerate(([pair, *bad, pair], [pair] * 2))
    )

    def pairs(source: PreferenceSource, **more: Any) -> Any:
        data = PreferenceData(train=source, eval=source, **more)
        return plain(load_preferences(source, tokenizer, data, 64, "data.train", "dpo.max_tokens"))

    assert pairs(source, overlong="drop") == pairs(other)
    assert "data.train: 6 of 8 are longer than dpo.max_tokens=64" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"0\.jsonl:3: the prompt: 80,021 characters are more than dpo\.max_tokens=64"):
        pairs(source)

    talks = [{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]} for text in ("4", LONG, ENDLESS)]
    spoken = ConversationSource(path=filled(tmp_path / "talks.jsonl", talks))
    data, dropping = SftData(train=spoken), SftData(train=spoken, overlong="drop")
    assert len(load_conversations(spoken, tokenizer, dropping, 64, "data.train")) == 1
    with pytest.raises(ConfigError, match=r"talks\.jsonl:3: the conversation: .* more than sft\.max_tokens=64"):
        load_conversations(spoken, tokenizer, data, 64, "data.train")
    long_answers = [
        {**row, "reward_model": {"ground_truth": text}} for row, text in zip(rows("a", "b", "c"), (LONG, "4", ENDLESS), strict=True)
    ]
    answers = FileSource(path=filled(tmp_path / "answers.jsonl", long_answers))
    assert len(load_answers(answers, tokenizer, dropping, 64, "data.train")) == 1
    assert capsys.readouterr().err.count("data.train: 2 of 3 are longer than sft.max_tokens=64, and left out") == 2


def test_data_overlong_applies_to_every_source(tmp_path: Path, tiny_model: Path) -> None:
    path = filled(tmp_path / "a.jsonl", rows("1 + 1?", LONG, ENDLESS, "2 + 2?"))
    (tmp_path / "sft.yaml").write_text(
        f"name: job\nrun_dir: {tmp_path}\nmodel: {{path: {tiny_model}, dtype: float32}}\ncluster: {{gpus: false}}\n"
        f"data: {{overlong: drop, train: {{type: file, path: {path}}}, eval: {{type: file, path: {path}}}}}\n"
        "sft: {steps: 2, batch_size: 2, max_tokens: 64, micro_batch_tokens: 64}\n"
    )
    found = check_sft(load(tmp_path / "sft.yaml", [], SftConfig))
    assert len(found.train) == len(found.held_out) == 2
    with pytest.raises(ConfigError, match=r"a\.jsonl:3: the prompt: .* more than sft\.max_tokens=64"):
        check_sft(load(tmp_path / "sft.yaml", ["data.overlong=refuse"], SftConfig))
