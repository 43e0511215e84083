"""`megarl config`: every key is told with its meaning, and what editors are given agrees with what megarl takes."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from megarl.cli import command as cli
from megarl.cli.describe import keys, schema
from megarl.config import EvalConfig, RunSettings, TrainConfig, load
from megarl.config.loading import sections
from megarl.verbs import VERBS
from tests.unit.examples.test_configurations import CONFIGS, EXAMPLES, root_of


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["config", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_of_every_verb_has_a_meaning(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, verb).splitlines()
    bare = [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if not line.startswith(" ") and not after.startswith("    ")]
    assert len(lines) > 80 and bare == []


def test_a_key_is_told_with_what_it_takes_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "train", "rollout.temperature").splitlines()[0] == "rollout.temperature: number > 0 = 1.0"
    assert told(capsys, "train", "train.steps").splitlines()[0] == "train.steps: integer > 0 <= 1000000000"
    assert "model.dtype: float32 | bfloat16 = bfloat16" in told(capsys, "serve", "model").splitlines()
    critic = told(capsys, "train", "critic")
    assert "critic: section | null = null" in critic and "critic.optimizer.lr: number > 0 = 2e-06\n" in critic
    assert told(capsys, "rm", "optimizer.lr").splitlines()[0] == "optimizer.lr: number > 0 = 1e-05"


def test_keys_of_one_type_are_told_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "train", "algorithm").splitlines()
    assert "algorithm.mu: number >= 0 = 0.1  [type: vapo]" in lines
    assert "algorithm.clip_high: number >= 0 = 0.28  [type: vapo, dapo]" in lines
    assert "algorithm.kl_coef: number >= 0 = 0.0" in lines, "all have it"
    assert "algorithm.correction.type: icepop" in lines
    assert "algorithm.correction.cap: number > 0 = 2.0  [type: tis]" in lines


def test_every_key_is_there() -> None:
    def walk(section: Any, above: str, inside: tuple[Any, ...]) -> set[str]:
        found = set()
        for name, field in section.model_fields.items():
            found.add(above + (field.alias or name))
            for inner in sections(field.annotation):
                if inside.count(inner) < 2:
                    found |= walk(inner, f"{above}{name}.", (*inside, inner))
        return found

    assert {key.name for key, _ in keys(TrainConfig)} == walk(TrainConfig, "", (TrainConfig,)) | {"base"}


def test_a_key_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "train", "rolout"]) == 2
    assert capsys.readouterr().err == "megarl: error: rolout: megarl train has no such key (did you mean 'rollout'?)\n"


@pytest.mark.parametrize("arguments", [["train"], ["train", "--schema"]], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_failure(arguments: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "megarl.cli", "config", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@cache
def validator_of(root: type[RunSettings]) -> jsonschema.Draft202012Validator:
    """A verb's schema, which takes most of a second to make."""
    return jsonschema.Draft202012Validator(schema(root))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_the_schema_takes_what_megarl_takes(path: Path) -> None:
    """A file as it stands, which may leave much to its base, and the whole tree."""
    root = root_of(path)
    validator = validator_of(root)
    validator.validate(yaml.safe_load(path.read_text()))
    validator.validate(json.loads(load(path, [], root).model_dump_json()))


@pytest.mark.parametrize(
    "change", [{"sed": 1}, {"seed": -1}, {"rollout": {"temperature": 0}}, {"model": {"path": "m", "dtype": "float16"}}, {"name": "/x"}]
)
def test_the_schema_refuses_what_megarl_refuses(change: dict[str, Any], tmp_path: Path) -> None:
    good = yaml.safe_load((EXAMPLES / "quickstart" / "eval.yaml").read_text())
    validator = validator_of(EvalConfig)
    validator.validate(good)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(good | change)
