"""Pairs from every kind of source, tokenised as a rollout makes them; refusals with key, file and line; tokenizers that differ."""

from __future__ import annotations

import json
import random
import shutil
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyarrow import parquet

from examples.make_data import WORDS, corrupted, preferences
from megarl.cli import command as cli
from megarl.config import ConfigError, PreferenceData, PreferenceMixture, PreferenceSource, ReasoningGymSource, SourceFormat
from megarl.data.preferences import Preference, load_preferences
from megarl.data.prompts import Prompt
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import check_same_tokenizer, decode, encode, load_tokenizer
from megarl.loops.pairs import pairs_of
from tests.unit.data.written import written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER = {"role": "user", "content": "Spell cat"}
ROW = {"prompt": "Spell cat", "chosen": "tac", "rejected": "cat"}
CONVERSATION = {"chosen": [USER, {"role": "assistant", "content": "tac"}], "rejected": [USER, {"role": "assistant", "content": "cat"}]}

Load = Callable[..., list[Preference]]


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Load:
    """The pairs of rows in a JSONL file (a text row is written as it is), or of any other source."""

    def load(*rows: Any, source: Any = None, limit: int = 64, chat: bool = True, **keys: Any) -> list[Preference]:
        if source is None:
            path = tmp_path / "pairs.jsonl"
            path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
            source = PreferenceSource(path=path, **keys)
        data = PreferenceData(train=source, eval=source, chat=chat)
        return load_preferences(source, tokenizer, data, limit, "data.train", "rm.max_tokens")

    return load


def texts(pair: Preference, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [decode(tokenizer, side.tokens[side.prompt_length :].tolist(), finished=True) for side in (pair.chosen, pair.rejected)]


def plain(pairs: list[Preference]) -> list[tuple[list[int], list[int], int, float]]:
    return [(pair.chosen.tokens.tolist(), pair.rejected.tokens.tolist(), pair.chosen.prompt_length, pair.margin) for pair in pairs]


def test_a_pair_is_two_finished_responses_to_the_prompt_that_a_rollout_would_see(load: Load, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = list(preferences(5, 50, 0, WORDS))
    source = ReasoningGymSource(dataset="spell_backward", params=WORDS, seed=5, items=50)
    prompts = load_prompts(source, tokenizer, SourceFormat(), 64, "data.train")
    pairs = load(*rows)
    assert len(pairs) == 50 and list(preferences(5, 50, 0, WORDS)) == rows
    for prompt, pair in zip(prompts, pairs, strict=True):
        right, wrong = texts(pair, tokenizer)
        assert right == prompt.answer and wrong.lower() != right.lower() and pair.margin == 0
        for side, text in ((pair.chosen, right), (pair.rejected, wrong)):
            assert side.tokens.tolist() == [*prompt.tokens, *encode(tokenizer, [text], special=False)[0], tokenizer.eos_token_id]
            assert side.prompt_length == len(prompt.tokens)


def test_corrupted_answers_have_every_fault_of_a_weak_model() -> None:
    draw = random.Random(0)
    wrong = {corrupted("olleh", "hello", draw) for _ in range(2000)}
    assert {"hello", "olle", "o", "lleh", "oleh", "olleeh"} <= wrong, "copied, cut, one letter lost, one doubled"
    assert not {"olleh", "", "lloeh"} & wrong, "never right, never empty, one fault at a time"
    assert any(len(text) == 5 and sum(a != b for a, b in zip(text, "olleh", strict=True)) == 1 for text in wrong), "one letter replaced"
    assert {"loleh", "ollhe"} <= wrong, "two swapped"
    assert all(corrupted("dad", "dad", draw) != "dad" for _ in range(200))
    assert {len(text) for text in (corrupted("4-1=3;3-7=-4", "4-1=4;4-7=4", draw) for _ in range(200))} > {11, 12, 13}
    for hopeless in ("", " ", "\n"):
        with pytest.raises(ValueError, match="cannot be corrupted"):
            corrupted(hopeless, hopeless, draw)


def test_texts_messages_and_whole_conversations_are_the_same_pair(load: Load, tmp_path: Path) -> None:
    as_messages = {"prompt": [USER], "chosen": CONVERSATION["chosen"][1:], "rejected": CONVERSATION["rejected"][1:]}
    rows = [ROW, {**ROW, "prompt": [USER]}, as_messages, CONVERSATION, {**CONVERSATION, "prompt": "Spell cat", "margin": None}]
    first, *others = plain(load(*rows))
    assert all(other == first for other in others)
    parquet.write_table(pyarrow.Table.from_pylist([CONVERSATION]), tmp_path / "a.parquet")
    assert plain(load(source=PreferenceSource(path=tmp_path / "a.parquet"))) == [first]


def test_columns_have_the_names_that_the_source_says(load: Load) -> None:
    row = {"question": "Spell cat", "answers": {"good": "tac", "bad": "cat"}, "by": 2}
    keys = {"prompt_key": "question", "chosen_key": "answers.good", "rejected_key": "answers.bad", "margin_key": "by"}
    assert plain(load(row, **keys)) == plain(load({**ROW, "margin": 2.0}))
    assert [pair.margin for pair in load({**ROW, "margin": 0.5}, ROW)] == [0.5, 0.0]


def test_several_sources_are_mixed_by_weight(load: Load, tmp_path: Path) -> None:
    for name, words in (("a", "ab cd ef gh"), ("b", "uv wx")):
        rows = ({"prompt": word, "chosen": word[::-1], "rejected": word} for word in words.split())
        written(tmp_path / f"{name}.jsonl", *rows)
    a, b = ({"path": tmp_path / f"{name}.jsonl"} for name in "ab")
    mixture = PreferenceMixture.model_validate({"parts": [{"source": a, "weight": 0.5}, {"source": b, "weight": 2}]})
    few, rest = plain(load(source=mixture))[:2], plain(load(source=mixture))[2:]
    assert rest == 2 * plain(load(source=PreferenceSource.model_validate(b)))
    assert all(pair in plain(load(source=PreferenceSource.model_validate(a))) for pair in few) and few[0] != few[1]
    data = PreferenceData.model_validate({"train": a, "eval": mixture.model_dump()})
    assert data.train == PreferenceSource.model_validate(a) and data.eval == mixture, "a source without a type is a file"
    (tmp_path / "b.jsonl").write_text('{"prompt": "x"}')
    with pytest.raises(
        ConfigError, match=r"^data\.train\.parts\.1\.source\.path: .*b\.jsonl:1: no value for data\.train\.parts\.1\.source\.chosen_key"
    ):
        load(source=mixture)


def test_margins_that_the_loss_does_not_read_are_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = PreferenceSource(path=tmp_path / "pairs.jsonl")
    source.path.write_text(json.dumps({**ROW, "margin": 2}) + "\n")
    data = PreferenceData(train=source, eval=source)
    for margins, margin, notes in ((True, 2.0, ""), (False, 0.0, "megarl: data.train: columns that nothing uses: margin\n")):
        [pair] = load_preferences(source, tokenizer, data, 64, "data.train", "dpo.max_tokens", margins)
        assert pair.margin == margin and capsys.readouterr().err == notes


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (f"\n{json.dumps(ROW)}", "empty line"),
        ("{", "not JSON: .*"),
        ({"prompt": "x", "chosen": "a"}, r"no value for data\.train\.rejected_key='rejected'; the row has prompt, chosen"),
        ({"prompt": "x", "chosen": None, "rejected": "a"}, r"data\.train\.chosen_key='chosen' is null"),
        ({"chosen": "a", "rejected": "b"}, r"no value for data\.train\.prompt_key='prompt'; .*"),
        ({**ROW, "rejected": "tac"}, "chosen and rejected are the same response"),
        ({**ROW, "chosen": " \n"}, "chosen is empty"),
        ({**ROW, "prompt": ""}, "the prompt is empty"),
        ({**ROW, "prompt": [USER, {"role": "assistant", "content": "?"}]}, "the prompt ends with .*, which belongs to chosen and rejected"),
        ({**ROW, "rejected": 3}, "rejected must be a text or a list of chat messages, not int"),
        ({**ROW, "rejected": [USER]}, "the messages of rejected must end with one of the assistant's"),
        (
            {**CONVERSATION, "rejected": [{**USER, "content": "?"}, CONVERSATION["rejected"][1]]},
            "chosen and rejected answer different prompts",
        ),
        ({**ROW, "rejected": "x" * 90}, r"prompt and response are \d+ tokens, more than rm\.max_tokens=64"),
        ({**ROW, "prompt": "x" * 90}, r"prompt of \d+ tokens is longer than rm\.max_tokens=64"),
        ({**ROW, "margin": -1}, "margin must be a number >= 0, not -1"),
        ({**ROW, "margin": float("nan")}, "margin must be a number >= 0, not nan"),
    ],
)
def test_a_faulty_row_is_refused_with_file_and_line(load: Load, row: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.train\.path: .*pairs\.jsonl:2: {line}$"):
        load(ROW, row)


def test_a_file_without_rows_or_without_a_known_ending_is_refused(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*pairs\.jsonl holds no pairs$"):
        load()
    with pytest.raises(ConfigError, match=r"^data\.train\.path: no such file: .*nowhere\.jsonl$"):
        load(source=PreferenceSource(path=tmp_path / "nowhere.jsonl"))
    (tmp_path / "pairs.csv").write_text("")
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*pairs\.csv must end in \.jsonl or \.parquet$"):
        load(source=PreferenceSource(path=tmp_path / "pairs.csv"))


def copy_of(model: Path, target: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(model, target)
    text = (target / file).read_text()
    assert old in text
    (target / file).write_text(text.replace(old, new, 1))
    return target


def test_tokenizers_are_compared_by_content(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "same")
    check_same_tokenizer(tmp_path / "same", "reward.path", tiny_model, "model.path")
    token = load_tokenizer(tiny_model).convert_ids_to_tokens(60)
    written = json.dumps(token, ensure_ascii=False)
    other = copy_of(tiny_model, tmp_path / "other", "tokenizer.json", written, json.dumps("QQ"))
    with pytest.raises(ConfigError, match=r"^reward\.path: its tokenizer differs from model\.path's: token '.*' is .* in .*other and .*$"):
        check_same_tokenizer(other, "reward.path", tiny_model, "model.path")
    ended = copy_of(tiny_model, tmp_path / "ended", "tokenizer_config.json", '"eos_token": "<|end|>"', '"eos_token": "<|pad|>"')
    with pytest.raises(ConfigError, match=r"differs from model\.path's: eos_token is '<\|pad\|>' in .*ended and '<\|end\|>' in"):
        check_same_tokenizer(ended, "reward.path", tiny_model, "model.path")
    with pytest.raises(ConfigError, match=r"^reward\.path: no tokenizer in .*nowhere"):
        check_same_tokenizer(tmp_path / "nowhere", "reward.path", tiny_model, "model.path")


STAGE = """
name: stage
run_dir: {runs}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false}}
data:
  train: {{type: {kind}, path: {data}}}
  eval: {{type: {kind}, path: {data}}}
{verb}: {{steps: 1, max_tokens: 64, micro_batch_tokens: 128}}
"""


@pytest.mark.parametrize(
    ("verb", "override", "line"),
    [
        ("rm", "rm.micro_batch_tokens=100", "rm.micro_batch_tokens=100 is below two times rm.max_tokens=64"),
        ("sft", "sft.micro_batch_tokens=60", "sft.micro_batch_tokens=60 is below sft.max_tokens=64"),
        ("rm", "rm.max_tokens=600 rm.micro_batch_tokens=1200", "rm.max_tokens: 600 tokens, and the model supports at most 512"),
        ("dpo", "dpo.batch_size=1 layout.ranks=2", "dpo.batch_size=1 is less than one for each of 2 data-parallel ranks"),
        ("dpo", "data.eval.path={one} layout.ranks=2", "data.eval: 1 in total, less than one for each of 2 data-parallel ranks"),
        ("dpo", "algorithm.beta=0", "algorithm.beta: Input should be greater than 0 (got 0)"),
        ("dpo", "algorithm.label_smoothing=0.5", "algorithm.label_smoothing: Input should be less than 0.5 (got 0.5)"),
        ("rm", "rm.stesp=1", "rm.stesp: unknown key (did you mean 'steps'?)"),
        ("sft", "sft.steps=0 data.eval=null", "sft.steps=0: nothing to learn, and no data.eval to measure"),
        ("dpo", "model.path={rm}", "model.path: {rm} is a Qwen3MoeForSequenceClassification: a critic or reward model, where a language"),
        (
            "rm",
            "model.path={other}",
            "model.path: {other}: model.embed_tokens.weight has shape [128, 128], expected [128, 96] by config.json",
        ),
    ],
)
def test_bad_settings_of_a_stage_are_refused_before_it_starts(
    verb: str, override: str, line: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy_of(tiny_model, tmp_path / "other", "config.json", '"hidden_size": 128', '"hidden_size": 96')
    classifier = copy_of(tiny_model, tmp_path / "rm", "config.json", "ForCausalLM", "ForSequenceClassification")
    data, one = tmp_path / "data.jsonl", tmp_path / "one.jsonl"
    row = json.dumps({**ROW, "messages": CONVERSATION["chosen"]}) + "\n"
    data.write_text(20 * row)
    one.write_text(row)
    kind = "conversations" if verb == "sft" else "file"
    (tmp_path / "stage.yaml").write_text(STAGE.format(runs=tmp_path / "runs", model=tiny_model, verb=verb, kind=kind, data=data))
    places = {"rm": classifier, "other": other, "one": one}
    assert cli.main([verb, str(tmp_path / "stage.yaml"), *override.format(**places).split()]) == 2
    *notes, shown = capsys.readouterr().err.splitlines()
    assert all("columns that nothing uses: messages" in note for note in notes)
    assert shown.startswith(f"megarl: error: {line.format(**places)}")
    assert not (tmp_path / "runs").exists()
    assert cli.main([verb, str(tmp_path / "stage.yaml"), "--check"]) == 0


def test_pairs_of_what_was_said_hold_each_text_once_and_the_better_one_first(tmp_path: Path) -> None:
    prompt = Prompt(0, "dog", array("I", [1]), "god", {}, "dog")
    said = [("god", 1.0), ("dgo", 0.0), ("god ", 1.0), ("gdo", 0.0), ("og", 0.5)]
    rows = list(pairs_of(prompt, said, 99, random.Random(0), tmp_path))
    assert sorted((row["chosen"], row["rejected"], row["margin"]) for row in rows) == [
        ("god", "dgo", 1.0),
        ("god", "gdo", 1.0),
        ("god", "og", 0.5),
        ("og", "dgo", 0.5),
        ("og", "gdo", 0.5),
    ]
    assert len(list(pairs_of(prompt, said, 2, random.Random(0), tmp_path))) == 2
    own = {"tools": [{"name": "add"}], "chat_template_kwargs": {"a": 1}}
    [row] = pairs_of(replace(prompt, meta={**own, "level": 3}), said, 1, random.Random(0), tmp_path)
    assert {name: row[name] for name in own} == own and "level" not in row
