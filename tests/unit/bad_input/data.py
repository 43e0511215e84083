"""Prompts, answers, conversations and pairs that are refused, as data (see `configurations`)."""

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.unit.bad_input.cases import (
    Case,
    Make,
    Room,
    given,
    prompts,
    rows,
)
from tests.unit.bad_input.configurations import DEEP, LONG
from tests.unit.data.written import ROW

SAID = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
DEEP_ROW = b'{"prompt": ' + DEEP


def pipe_of_rows(room: Room) -> list[str]:
    os.mkfifo(room.here / "rows.jsonl")
    return [str(room.config()), f"data.train={{type: file, path: {room.here}/rows.jsonl}}"]


def parquet(columns: Callable[[], dict[str, Any]]) -> Make:
    """A Parquet file of these columns."""

    def make(room: Room) -> list[str]:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns()), room.here / "rows.parquet", compression="zstd")
        return [str(room.config()), f"data.train={{type: file, path: {room.here}/rows.parquet}}"]

    return make


def scored(kind: str, *lines: Any) -> Make:
    """Prompts with another reward."""
    return lambda room: [*prompts(*lines)(room), f"reward.source={{type: {kind}}}"]


def on_disk(columns: Callable[[], dict[str, Any]]) -> Make:
    """A directory of `datasets` with these columns."""

    def make(room: Room) -> list[str]:
        import pyarrow

        table, place = pyarrow.table(columns()), room.here / "saved"
        place.mkdir()
        with pyarrow.OSFile(str(place / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        (place / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        return [str(room.config()), f"data.train={{type: file, path: {place}}}"]

    return make


def mixture(row: dict[str, Any], key: str, more: str = "") -> Make:
    """A mixture of two rows and of one, whose weights choose none."""

    def make(room: Room) -> list[str]:
        (room.here / "rows.jsonl").write_text(2 * (json.dumps(row) + "\n"))
        source = f"path: {room.here}/rows.jsonl{more}"
        parts = f"{{weight: 0.2, source: {{{source}}}}}, {{weight: 0.3, source: {{{source}, rows: 1}}}}"
        return [str(room.config()), f"{key}={{type: mixture, parts: [{parts}]}}"]

    return make


def repeated(text: str, rows: int) -> Callable[[], dict[str, Any]]:
    """A column of one text."""

    def columns() -> dict[str, Any]:
        import pyarrow

        return {"prompt": pyarrow.DictionaryArray.from_arrays(np.zeros(rows, np.int8), [text])}

    return columns


def answer(value: str) -> str:
    return f'{{"prompt": "1+1", "reward_model": {{"ground_truth": {value}}}}}'


TABLE = [
    # --- data
    *(
        Case(f"an answer of {value}", "train", prompts(answer("1"), answer(value)), rf"^data\.train\.path: .*rows\.jsonl:2: {line}")
        for value, line in (
            ("null", "data.train.answer_key='reward_model.ground_truth' is null$"),
            ("NaN", "reward_model.ground_truth must be a text, a finite number, or a list or an object of these, not nan$"),
            ("Infinity", "reward_model.ground_truth must be .*, not inf$"),
            ("[1, NaN]", "reward_model.ground_truth must be .*, not nan$"),
            ("[]", "reward_model.ground_truth must be .*, not an empty list$"),
        )
    ),
    *(
        Case(f"an answer for {kind} of {value}", "train", scored(kind, answer("1"), answer(value)), rf"rows\.jsonl:2: the answer {line}$")
        for kind, value, line in (
            ("math_verify", '{"a": 1}', "{'a': 1} is neither a text nor a number, nor a list of them"),
            ("math_verify", "[1, [2]]", r"\[2\] is neither a text nor a number, nor a list of them"),
            ("reasoning_gym", "true", "True is neither a text nor a number, nor a list of them"),
            ("math_verify", '"June 5"', r"'June 5' is read by math-verify as j\*u\*n\*E\*5"),
        )
    ),
    Case(
        "an answer of bytes",
        "train",
        parquet(lambda: {"prompt": ["1"], "reward_model": [{"ground_truth": b"2"}]}),
        r"^data\.train\.path: .*rows\.parquet:1: reward_model\.ground_truth must be .*, not b'2'$",
    ),
    Case(
        "a row with a key twice", "train", prompts('{"prompt": "1", "prompt": "2"}'), r"rows\.jsonl:1: not JSON: 'prompt' is there twice$"
    ),
    Case(
        "an inner key twice",
        "train",
        prompts(answer("1"), '{"prompt": "1", "reward_model": {"ground_truth": 1, "ground_truth": 2}}'),
        r"rows\.jsonl:2: not JSON: 'ground_truth' is there twice$",
    ),
    Case(
        "a row with half a surrogate pair",
        "train",
        prompts('{"prompt": "\\ud83d", "reward_model": {"ground_truth": "1"}}'),
        r"rows\.jsonl:1: not JSON: .*surrogates not allowed$",
    ),
    Case("a row of lists", "train", rows(DEEP_ROW, more=", type: file"), r"rows\.jsonl:1: not JSON: nested too deeply$"),
    Case(
        "a prompt of 10 MB",
        "train",
        prompts({"prompt": "x" * 10_000_000, "reward_model": {"ground_truth": "1"}}),
        r"rows\.jsonl:1: the prompt: 10,000,0\d\d characters are more than rollout\.max_prompt_tokens=16 tokens of at most \d+$",
    ),
    Case(
        "an answer of 10 MB",
        "sft",
        prompts({"prompt": "x", "reward_model": {"ground_truth": "1" * 10_000_000}}),
        r"^data\.train\.path: .*rows\.jsonl:1: the response: 10,000,000 characters are more than sft\.max_tokens=64",
    ),
    Case(
        "a conversation of 10 MB",
        "sft",
        rows(
            json.dumps({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 10_000_000}]}) + "\n",
            more=", type: conversations",
        ),
        r"rows\.jsonl:1: the conversation: 10,000,0\d\d characters are more than sft\.max_tokens=64",
    ),
    Case(
        "a chosen response of 10 MB",
        "dpo",
        rows(json.dumps({"prompt": "x", "chosen": "y" * 10_000_000, "rejected": "z"}) + "\n", "data.eval"),
        r"rows\.jsonl:1: chosen: 10,000,000 characters are more than dpo\.max_tokens=64",
    ),
    Case(
        "a pair with a key twice",
        "rm",
        rows('{"prompt": "1", "chosen": "2", "chosen": "3", "rejected": "4"}\n', "data.eval"),
        r"rows\.jsonl:1: not JSON: 'chosen' is there twice$",
    ),
    Case("a line of 65 MB", "train", rows(b" " * (65 << 20), more=", type: file"), r"rows\.jsonl:1: a line of more than 67,108,864 bytes$"),
    Case(
        "10 million rows in 30 kB",
        "train",
        parquet(repeated("x", 10_000_000)),
        r"^data\.train\.path: .*rows\.parquet says that it has 10,000,000 rows in [\d,]+ bytes$",
    ),
    Case(
        "4 GB of rows in 2 kB",
        "train",
        parquet(repeated("x" * (1 << 20), 4096)),
        r"^data\.train\.path: .*rows\.parquet is not readable as Parquet after row 0: .*(MemoryError|alloc)",
    ),
    Case(
        "a small directory of datasets of large texts",
        "train",
        on_disk(repeated("x" * (1 << 20), 4096)),
        r"^data\.train\.path: .*data\.arrow is not readable as Arrow after row 0: ",
    ),
    *(
        Case(
            f"where {where}",
            "train",
            rows('{"prompt": "1", "level": 3}\n', more=f", type: file, where: {where}"),
            f"^data.train.where{line}",
        )
        for where, line in (
            ("{lvl: 1}", r": no row of \S+ has a value for 'lvl'; the first one has prompt, level$"),
            ("{level: [1, 2]}", r": selects none of the 1 rows of \S+, where level is 3$"),
            ("{level: {min: 2, max: 1}}", ": level: min=2 is above max=1$"),
            ("{level: {}}", r": level: a range has the numbers min, max or both \(got \{\}\)$"),
            ("{level: {min: 1, most: 2}}", r": level: a range has the numbers min, max or both \(got \{'min': 1, 'most': 2\}\)$"),
            ("{level: [[1]]}", r": level: must be strings, numbers, true or false, or a mapping of min and max \(got \[\[1\]\]\)$"),
            ("{level: }", r": level: must be strings, numbers, true or false, or a mapping of min and max \(got None\)$"),
            ("[level]", ": Input should be an object"),
        )
    ),
    Case(
        "conversations none of which is chosen",
        "sft",
        rows('{"messages": [], "level": 3}\n', more=", type: conversations, where: {level: 2}"),
        r"^data\.train\.where: selects none of the 1 rows of \S+, where level is 3$",
    ),
    Case(
        "pairs none of which is chosen",
        "dpo",
        rows('{"prompt": "1", "level": 3}\n', "data.eval", ", where: {level: 2}"),
        r"^data\.eval\.where: selects none of the 1 rows of \S+, where level is 3$",
    ),
    *(
        Case(
            f"a mixture for {verb} of which nothing comes up",
            verb,
            make,
            r"^data\.(train|eval)\.parts: the weights choose none of 3 items: of a part at most 0\.4, which rounds to 0$",
        )
        for verb, make in (
            ("train", mixture(ROW, "data.train", ", type: file")),
            ("eval", mixture(ROW, "data.eval", ", type: file")),
            ("sft", mixture({"messages": SAID}, "data.train", ", type: conversations")),
            ("dpo", mixture({"prompt": "1", "chosen": "2", "rejected": "3"}, "data.eval")),
        )
    ),
    Case("a pipe of prompts", "train", pipe_of_rows, r"^data\.train\.path: no such file: "),
    Case(
        "a parameter of reasoning-gym that is no file",
        "train",
        given("data.train.params={data_file: nowhere}"),
        r"^data\.train\.params: spell_backward .*FileNotFoundError|No such file",
    ),
    *(
        Case(
            f"reasoning-gym's {name}",
            "train",
            given(f"data.train={{type: reasoning_gym, seed: 1, items: 64, {rest}}}"),
            rf"^data\.train\.params: {dataset} .*: {error}",
        )
        for name, rest, dataset, error in (
            (
                "endless equation",
                "dataset: simple_equations, params: {min_terms: 1000000000, max_terms: 1000000000}",
                "simple_equations",
                "TimeoutError: not done within .* s of CPU time$",
            ),
            ("primes", "dataset: count_primes, params: {min_n: 1000000000, max_n: 1000000000}", "count_primes", "MemoryError$"),
        )
    ),
    Case(
        "a data set with a long name",
        "train",
        given(f"data.train.dataset={LONG * 100}"),
        r"^data\.train\.dataset: reasoning-gym has no dataset 'x{1000}",
    ),
]
