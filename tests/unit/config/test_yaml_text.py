"""What a configuration's text means, and that what is written is read again by any reader. What is refused: tests/unit/bad_input."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import TrainConfig, dump, load
from megarl.config.yaml_text import read, write

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart" / "rl.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("0", 0), ("-3", -3), ("+3", 3), ("1.5", 1.5), ("5.", 5.0), (".5", 0.5), ("1e-6", 1e-6), ("1.E+3", 1000.0), ("-1e3", -1000.0)],
        *[("true", True), ("False", False), ("null", None), ("~", None), ("", None), (".inf", float("inf")), ("-.INF", -float("inf"))],
        *[("010", "010"), ("0x1f", "0x1f"), ("0b1", "0b1"), ("0o7", "0o7"), ("1:30", "1:30"), ("1_000", "1_000"), ("1e", "1e")],
        *[("yes", "yes"), ("off", "off"), ("NULL ", None), ("2026-11-22", "2026-11-22"), ("'1'", "1"), ("nan", "nan"), ("inf", "inf")],
        *[("[1, 'a', {b: c}]", [1, "a", {"b": "c"}]), ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}), ('"\\u00e9"', "é")],
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = read(text)
    assert (found, type(found)) == (value, type(value))


def test_written_yaml_is_read_alike_by_yaml_1_1_and_1_2() -> None:
    """Ours, and PyYAML's own of YAML 1.1."""
    texts = [
        "1",
        "1e-6",
        "010",
        "0x1f",
        "1:30",
        "1_000",
        "yes",
        "No",
        "on",
        "true",
        "null",
        "~",
        "",
        ".5",
        ".inf",
        "2026-11-22",
        "=",
        "<<",
        "a: b",
    ]
    tree = {
        "texts": texts,
        "numbers": [0, -1, 1e-6, 1e300, 0.1, 12345678901234567890],
        "rest": [True, None, {}, []],
        **{text: 1 for text in texts},
    }
    assert read(write(tree)) == tree == yaml.safe_load(write(tree))


def test_the_config_yaml_of_a_run_is_a_configuration(tmp_path: Path) -> None:
    config = load(EXAMPLE, ["optimizer.lr=1e-6", "name='010'"], TrainConfig)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml", [], TrainConfig) == config
