"""Rows are chosen by their columns: the same ones from every kind of file, small or large, as a comprehension takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyarrow import parquet

from megarl.config import (
    ConfigError,
    ConversationSource,
    FileSource,
    MixtureSource,
    PreferenceData,
    PreferenceSource,
    SftData,
    SourceFormat,
)
from megarl.config.data import PromptPart
from megarl.data import large
from megarl.data.preferences import load_preferences
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_conversations
from tests.unit.data.written import ROW, save_to_disk, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS: list[dict[str, Any]] = [
    {
        **ROW,
        "prompt": f"{n} + 17?",
        "data_source": ("sums", "words")[n % 2],
        "hard": n % 3 == 0,
        "rate": None if n % 5 == 0 else n / 100,
        "extra_info": {"level": n % 4, "of.what": n},
    }
    for n in range(60)
]
KINDS = ("jsonl", "parquet", "categories", "datasets", "large parquet", "large datasets")
Read = Callable[..., list[str]]


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileSource:
    """The rows in a file of some kind."""
    if request.param.startswith("large"):
        monkeypatch.setattr(large, "LARGE", 50)
        monkeypatch.setattr(large, "SAMPLED", 4)
    if request.param == "jsonl":
        return write(tmp_path / "a.jsonl", *ROWS)
    if request.param.endswith("datasets"):
        return save_to_disk(tmp_path / "a", ROWS)
    table = pyarrow.Table.from_pylist(ROWS)
    if request.param == "categories":
        monkeypatch.setattr(large, "LARGE", 50)
        table = table.set_column(table.column_names.index("data_source"), "data_source", table["data_source"].dictionary_encode())
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=16)
    return FileSource(path=tmp_path / "a.parquet")


@pytest.fixture
def read(tokenizer: PreTrainedTokenizerBase) -> Read:
    """The questions of a source."""

    def read(source: Any, where: dict[str, Any], **changes: Any) -> list[str]:
        chosen = source.model_copy(update={"where": where, **changes})
        prompts = list(load_prompts(chosen, tokenizer, SourceFormat(), 64, "data.train"))
        assert [prompt.id for prompt in prompts] == list(range(len(prompts)))
        return [prompt.text for prompt in prompts]

    return read


CONDITIONS: list[tuple[dict[str, Any], Callable[[dict[str, Any]], bool]]] = [
    ({"extra_info.level": [1, 3]}, lambda row: row["extra_info"]["level"] in (1, 3)),
    ({"extra_info.level": 2.0}, lambda row: row["extra_info"]["level"] == 2),
    ({"data_source": "words", "hard": True}, lambda row: row["data_source"] == "words" and row["hard"]),
    ({"rate": {"min": 0.11, "max": 0.4}}, lambda row: row["rate"] is not None and 0.11 <= row["rate"] <= 0.4),
    ({"rate": {"max": 0.2}, "extra_info.level": {"min": 1}}, lambda row: (row["rate"] or 1) <= 0.2 and row["extra_info"]["level"] >= 1),
]


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_every_kind_of_file_gives_the_rows_that_are_asked_for(source: FileSource, read: Read) -> None:
    for where, taken in CONDITIONS:
        assert read(source, where) == [row["prompt"] for row in ROWS if taken(row)]
        window = {"skip": 4, "rows": 52}  # of the file, so that what another source leaves out stays left out
        assert read(source, where, **window) == [row["prompt"] for row in ROWS[4:56] if taken(row)]


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_a_where_that_selects_no_row_is_refused(source: FileSource, read: Read) -> None:
    refused = [
        ({"extra_info.lvl": 1}, r"no row of \S+ has a value for 'extra_info.lvl'; the first one has prompt, .*, extra_info.level, "),
        ({"hard": 1}, r"selects none of the 60 rows of \S+, where hard is True, False$"),
        ({"hard": {"min": 0}}, "selects none of the 60 rows"),
        ({"data_source": ["Sums"]}, "selects none of the 60 rows of .*, where data_source is 'sums', 'words'$"),
        ({"data_source": {"min": 1}}, "selects none of the 60 rows"),
        ({"extra_info": 1}, r"selects none of the 60 rows of .*, where extra_info is \{"),
        ({"rate": 5, "hard": True}, r"selects none of the 60 rows of .*, where rate is 0.01, 0.02, 0.03, 0.04, ...; hard is "),
        ({"extra_info.level": 0, "extra_info.of.what": 0}, r"no row of \S+ has a value for 'extra_info.of.what'"),
    ]
    for where, line in refused:
        with pytest.raises(ConfigError, match=rf"^data\.train\.where: {line}"):
            read(source, where)


@pytest.mark.parametrize("long", [False, True], ids=["small", "large"])
def test_a_row_that_is_left_out_is_not_looked_at_and_one_that_is_taken_has_its_own_number(
    long: bool, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "LARGE", 50 if long else 100)
    monkeypatch.setattr(large, "SAMPLED", 4)
    rows = [{**row, "prompt": " "} if n in (7, 30) else row for n, row in enumerate(ROWS)]  # of level 3 and 2
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = FileSource(path=tmp_path / "a.parquet", skip=2)
    assert len(read(source, {"extra_info.level": [0, 1]})) == sum(n % 4 < 2 for n in range(2, 60))
    with pytest.raises(ConfigError, match=r"a\.parquet:31: the prompt is empty$"):
        read(source, {"extra_info.level": [0, 1, 2]})


def test_a_curriculum_is_a_mixture_of_what_is_chosen(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *ROWS)
    levels: tuple[tuple[Any, float], ...] = ((0, 2), ({"min": 2}, 0.5))
    parts = [PromptPart(source=file.model_copy(update={"where": {"extra_info.level": level}}), weight=weight) for level, weight in levels]
    prompts = load_prompts(MixtureSource(parts=parts), tokenizer, SourceFormat(), 64, "data.train")
    shown = [int(prompt.text.split()[0]) % 4 for prompt in prompts]
    assert shown[:30] == [0] * 30 and len(shown) == 45 and set(shown[30:]) == {2, 3}


def test_conversations_and_pairs_are_chosen_too(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    where = {"level": {"max": 1}}
    said = [{"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "b"}], "level": n} for n in range(4)]
    talks = ConversationSource(path=write(tmp_path / "talks.jsonl", *said).path, where=where)
    assert len(load_conversations(talks, tokenizer, SftData(train=talks), 64, "data.train")) == 2
    rows = [{"prompt": f"{n}", "chosen": "b", "rejected": "c", "level": n} for n in range(4)]
    pairs = PreferenceSource(path=write(tmp_path / "pairs.jsonl", *rows).path, where=where)
    data = PreferenceData(train=pairs, eval=pairs)
    assert len(load_preferences(pairs, tokenizer, data, 64, "data.train", "rm.max_tokens")) == 2

    def taken(**update: Any) -> list[list[Any]]:
        return [
            load_conversations(talks.model_copy(update=update), tokenizer, SftData(train=talks), 64, "data.train"),
            load_preferences(pairs.model_copy(update=update), tokenizer, data, 64, "data.train", "rm.max_tokens"),
        ]

    assert list(map(len, taken(skip=1, rows=2))) == [1, 1], "of rows 1 and 2 that of level 1"
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .* holds no conversations after the first 9$"):
        taken(skip=9)
    with pytest.raises(ConfigError, match=r"^data\.train\.path: .* holds no pairs after the first 9$"):
        load_preferences(pairs.model_copy(update={"skip": 9}), tokenizer, data, 64, "data.train", "rm.max_tokens")
    with pytest.raises(ConfigError, match=r"^data\.eval\.where: selects none of the 4 rows of .*, where level is 0, 1, 2, 3$"):
        none = pairs.model_copy(update={"where": {"level": {"min": 9}}})
        load_preferences(none, tokenizer, data, 64, "data.eval", "rm.max_tokens")
