"""An answer keeps its value from the row to the verifier."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megarl.config import ConfigError, FileSource
from megarl.data.answers import text_of
from megarl.data.files import read_file
from tests.unit.data.written import save_to_disk, write


def answers(source: FileSource) -> list[Any]:
    return [answer for _, _, answer, _ in read_file(source, "data.train")]


def row(answer: Any) -> dict[str, Any]:
    return {"prompt": "Q", "reward_model": {"ground_truth": answer}, "n": 0.1}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_becomes_a_text_of_the_same_value_without_an_exponent(number: float) -> None:
    assert float(text_of(number)) == number and "e" not in text_of(number).lower()


def test_answers_become_text_without_exponents() -> None:
    assert [text_of(one) for one in (0.00001, 1e16, -2.5e-7, 72, 72.0)] == ["0.00001", "10000000000000000", "-0.00000025", "72", "72.0"]
    assert [text_of(one) for one in ("1e-5", True, ["é", 1])] == ["1e-5", "true", '["é", 1]']


JSON = {
    "0.00001": 1e-05,
    "1E-5": 1e-05,
    "72": 72,
    "72.50": 72.5,
    "123456789012345678": 123456789012345678,
    "123456789012345678.0": "123456789012345678.0",
    "9007199254740993e0": "9007199254740993",
    "0.12345678901234567890": "0.12345678901234567890",
    "true": True,
    '"6.02e23"': "6.02e23",
    '["1", 2.5, 9007199254740993.0]': ["1", 2.5, "9007199254740993.0"],
    '{"target": 24, "numbers": [1, 2, null]}': {"target": 24, "numbers": [1, 2, None]},
}


def test_json_numbers_keep_their_digits_and_their_type(tmp_path: Path) -> None:
    lines = [json.dumps(row("?")).replace('"?"', text) for text in JSON]
    read = answers(write(tmp_path / "a.jsonl", *lines))
    assert read == list(JSON.values()) and [type(one) for one in read] == [type(one) for one in JSON.values()]
    rows = read_file(write(tmp_path / "b.jsonl", *lines), "data.train")
    assert all(meta == {"n": 0.1} for *_, meta in rows)


COLUMNS = {
    "float64": (pyarrow.array([1e-05, 1234.56]), [1e-05, 1234.56]),
    "float32": (pyarrow.array([0.1, 1234.56], pyarrow.float32()), [0.1, 1234.56]),
    "float16": (pyarrow.array([0.1, 3.0], pyarrow.float16()), [0.1, 3.0]),
    "lists": (pyarrow.array([[0.1], [2.5, 0.3]], pyarrow.list_(pyarrow.float32())), [[0.1], [2.5, 0.3]]),
    "objects": (pyarrow.array([{"x": 0.1}, {"x": 2}], pyarrow.struct({"x": pyarrow.float32()})), [{"x": 0.1}, {"x": 2.0}]),
    "decimals": (
        pyarrow.array([Decimal("18.90"), Decimal("12345678901234567.25")], pyarrow.decimal128(30, 2)),
        [18.9, "12345678901234567.25"],
    ),
    "integers": (pyarrow.array([2**63, 7], pyarrow.uint64()), [2**63, 7]),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("form", ["parquet", "nested", "saved"])
def test_columns_of_every_type_keep_what_was_written(tmp_path: Path, kind: str, form: str) -> None:
    column, wanted = COLUMNS[kind]
    inside = pyarrow.StructArray.from_arrays([column], ["ground_truth"])
    table = pyarrow.table({"prompt": ["a", "b"], **({"reward_model": inside} if form == "nested" else {"answer": column})})
    source = FileSource(path=tmp_path / ("a" if form == "saved" else "a.parquet"), answer_key="answer")
    if form == "saved":
        save_to_disk(source.path, [{"prompt": "a"}], shards=1)
        with (
            pyarrow.OSFile(str(source.path / "data-00000-of-00001.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table)
    else:
        parquet.write_table(table, source.path)
    assert answers(FileSource(path=source.path) if form == "nested" else source) == wanted


@pytest.mark.parametrize(
    ("text", "fault"), [("NaN", "nan"), ("Infinity", "inf"), ("1e400", "Infinity|inf"), ("[]", "an empty list"), ("[1, NaN]", "nan")]
)
def test_malformed_answers_are_refused_with_file_and_line(tmp_path: Path, text: str, fault: str) -> None:
    source = write(tmp_path / "a.jsonl", row("34"), json.dumps(row("?")).replace('"?"', text))
    message = r"a\.jsonl:2: reward_model\.ground_truth must be a text, a finite number, or a list or an object of these, not .*"
    with pytest.raises(ConfigError, match=f"{message}({fault})"):
        answers(source)
