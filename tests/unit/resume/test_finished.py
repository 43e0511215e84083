"""A run that has finished and is started again has nothing to do, and says so; unless more is asked of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import DpoConfig, RmConfig, SftConfig, TrainConfig, TrainingSettings, ValueConfig, load
from megarl.observe.metrics import Mean
from megarl.observe.run import Run
from megarl.resume.finished import has_finished
from tests.unit.bad_input.cases import VERBS

ROOTS: dict[str, type[TrainingSettings]] = {"train": TrainConfig, "value": ValueConfig, "sft": SftConfig, "rm": RmConfig, "dpo": DpoConfig}
FIXED = {"value": ("algorithm={type: ppo}", "critic={pretrain_steps: 3}")}  # a resumed run cannot change the steps of value pretraining


def config(verb: str, place: Path, *overrides: str) -> Any:
    (place / f"{verb}.yaml").write_text(VERBS[verb].format(runs=place / "runs", model=place / "model"))
    return load(place / f"{verb}.yaml", [*FIXED.get(verb, ()), *overrides], ROOTS[verb])


def finished(settings: TrainingSettings, steps: int = 3) -> None:
    settings.model.path.mkdir(exist_ok=True)
    (settings.model.path / "config.json").write_text("{}")
    with Run(settings) as run:
        for step in range(1, steps + 1):
            run.log(step, {"actor/grad_norm": Mean(1.0, 2.0)})


@pytest.mark.parametrize("verb", list(ROOTS))
def test_every_verb_says_in_one_line_that_there_is_nothing_to_do(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = f"{verb}.steps"
    finished(config(verb, tmp_path) if verb in FIXED else config(verb, tmp_path, f"{key}=3"))
    left = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    for steps, lower in [(None, "")] if verb in FIXED else [(3, ""), (2, f"{key}=2, and ")]:
        capsys.readouterr()
        assert main([verb, str(tmp_path / f"{verb}.yaml"), *FIXED.get(verb, (f"{key}={steps}",))]) == 0
        [line] = capsys.readouterr().err.splitlines()
        larger = "" if verb in FIXED else f"a larger {key} goes on, "
        assert line == f"job: {lower}this run has finished, after 3 steps: nothing to do ({larger}save.resume=false starts over)"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == left


@pytest.mark.parametrize(
    ("overrides", "there"),
    [
        ((), True),
        (("cluster.phase_timeout_s=99", "log.samples=0", "save.every=2"), True),
        (("train.steps=4",), False),
        (("train.best=eval/heldout/avg@1", "train.eval_every=1", "train.patience=2"), False),
        (("save.resume=false",), False),
        (("optimizer.lr=0.5",), False),
        (("name=other",), False),
    ],
)
def test_more_steps_another_patience_and_another_run_are_work(overrides: tuple[str, ...], there: bool, tmp_path: Path) -> None:
    finished(config("train", tmp_path, "train.steps=3"))
    assert has_finished(config("train", tmp_path, "train.steps=3", *overrides)) is there


def test_a_run_that_has_not_finished_and_another_verb_are_work(tmp_path: Path) -> None:
    settings = config("value", tmp_path)
    finished(settings)
    assert has_finished(settings) and not has_finished(TrainConfig.model_validate(settings.model_dump()))
    (settings.directory / "summary.json").unlink()
    assert not has_finished(settings)


def test_a_model_or_data_that_was_edited_since_is_another_run(tmp_path: Path) -> None:
    settings = config("sft", tmp_path)
    finished(settings)
    assert has_finished(settings)
    (settings.model.path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    assert not has_finished(settings)


def test_a_record_or_configuration_that_cannot_be_read_is_no_finished_run(tmp_path: Path) -> None:
    settings = config("sft", tmp_path)
    finished(settings)
    for name in ("config.yaml", "run.json"):
        kept = (settings.directory / name).read_bytes()
        (settings.directory / name).write_bytes(b"\xff")
        assert not has_finished(settings)
        (settings.directory / name).write_bytes(kept)
    assert has_finished(settings)
