"""What a run says of itself: the parts of its start, where it goes on from, what is saved when it is interrupted, where all of it is."""

import re
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints.steps import CHECKPOINTS
from megarl.config import ConfigError, DpoConfig, RunSettings, SftConfig, TrainConfig, load
from megarl.errors import Stopped
from megarl.observe.metrics import Mean
from megarl.observe.output import LOGS
from megarl.observe.run import METRICS, Run
from megarl.observe.samples import SampleRecord
from tests.unit.bad_input.cases import VERBS

ROOTS: dict[str, type[RunSettings]] = {"train": TrainConfig, "sft": SftConfig, "dpo": DpoConfig}
RECORD = SampleRecord("1 + 1?", "2", "2", 1.0, {}, None, "stop", 1, 0, False, 1, True)
Told = list[str]


def config(verb: str, place: Path, *overrides: str) -> Any:
    (place / "job.yaml").write_text(VERBS[verb].format(runs=place / "runs", model="nowhere"))
    return load(place / "job.yaml", list(overrides), ROOTS[verb])


def lines(capsys: pytest.CaptureFixture[str]) -> Told:
    """What the console has said since."""
    return [line.removeprefix("job: ") for line in capsys.readouterr().err.splitlines()]


def steps(run: Run, count: int) -> None:
    for step in range(1, count + 1):
        run.log(step, {"reward/mean": Mean(1.0, 2.0)})


def test_start_up_phases_are_named_at_their_begin_and_timed_at_their_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(config("train", tmp_path)) as run:
        lines(capsys)
        with run.starting("Ray"):
            assert lines(capsys) == ["start: Ray ..."]
        [ready] = lines(capsys)
        assert re.fullmatch(r"Ray: ready after \d+\.\d s", ready)
        with pytest.raises(OSError, match="no room"), run.starting("engines"):
            raise OSError("no room")
        assert lines(capsys) == ["start: engines ..."]


def test_a_start_says_from_which_step_it_resumes_or_where_the_earlier_run_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config("train", tmp_path)
    with Run(settings) as run:
        steps(run, 2)
        state = run.state()
        steps(run, 3)
    lines(capsys)
    with Run(settings, state):
        assert lines(capsys) == ["resuming from the checkpoint of step 2"]
    lines(capsys)
    with Run(settings):
        assert lines(capsys) == [f"files of an earlier run with this name were moved to {settings.directory / 'earlier-2'}"]


def test_a_resume_refuses_metrics_that_no_run_wrote(tmp_path: Path) -> None:
    settings = config("train", tmp_path)
    with Run(settings) as run:
        steps(run, 2)
        state = run.state()
    path = settings.directory / METRICS
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": {'))
    with (
        pytest.raises(ConfigError, match=rf"^save\.resume: {path}:2: not a row of metrics: .*; restore it, or start over$"),
        Run(settings, state),
    ):
        pass


@pytest.mark.parametrize("saved", [None, "step_000002"])
def test_an_interrupted_run_says_what_is_saved(saved: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Run(config("train", tmp_path)) as run:
        steps(run, 3)
        if saved is not None:
            (run.directory / CHECKPOINTS).mkdir()
            (run.directory / CHECKPOINTS / "latest").write_text(saved + "\n")
        lines(capsys)
        raise KeyboardInterrupt
    then = "begins from scratch (save.every)" if saved is None else "resumes from step_000002"
    assert lines(capsys) == [f"interrupted after step 3; another start {then}"]


def test_a_run_without_checkpoints_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(config("train", tmp_path, "train.steps=50", "save.every_minutes=0")):
        off = "save.every=0 and save.every_minutes=0"
        assert lines(capsys) == [f"{off}: none of the 50 steps is saved as a checkpoint; a killed run starts over"]
    for name, saves in (("steps", ("save.every=10",)), ("minutes", ())):
        with Run(config("train", tmp_path, "train.steps=50", f"name={name}", *saves)):
            assert not any("save.every" in line for line in lines(capsys))


@pytest.mark.parametrize(("verb", "key"), [("train", "train.steps"), ("sft", "sft.steps"), ("dpo", "dpo.steps")])
def test_a_run_with_more_steps_than_configured_is_reported(verb: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(config(verb, tmp_path, f"{key}=3")) as run:
        for step in range(1, 4):
            run.log(step, {"actor/grad_norm": Mean(1.0, 2.0)})
        state = run.state()
    for wanted, told in ((3, []), (2, [f"{key}=2: 3 steps are done already, and none is added"])):
        lines(capsys)
        with Run(config(verb, tmp_path, f"{key}={wanted}"), state):
            assert lines(capsys) == ["resuming from the checkpoint of step 3", *told]


@pytest.mark.parametrize(
    ("verb", "kept", "model", "following"),
    [
        ("train", True, True, ["next: megarl samples {} --worst"]),
        ("train", False, True, []),
        ("sft", False, True, ['next: megarl generate {}/model "a prompt"']),
        ("dpo", False, True, ['next: megarl generate {}/model "a prompt"']),
        ("sft", False, False, []),  # sft.steps=0 measures, and saves no model
    ],
)
def test_at_its_end_a_run_says_where_all_of_it_is_and_the_next_command(
    verb: str, kept: bool, model: bool, following: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(config(verb, tmp_path)) as run:
        if kept:
            run.keep(1, [RECORD])
        if model:
            (run.directory / "model").mkdir()
    found = [name for name, there in (("report.html", True), ("summary.json", True), ("samples", kept), ("model", model)) if there]
    told, kinds = lines(capsys), ", ".join(found)
    where, *after = told[told.index(next(line for line in told if line.startswith("results are in "))) :]
    assert where == f"results are in {run.directory}: {kinds}" and after == [line.format(run.directory) for line in following]


@pytest.mark.parametrize(("gpus", "told"), [(1, ""), (2, " --tp 2"), (None, None)])
def test_the_next_command_takes_as_many_gpus_as_the_model_needs(
    gpus: int | None, told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(config("sft", tmp_path)) as run:
        run.engine_gpus = gpus
        (run.directory / "model").mkdir()
    following = [line for line in lines(capsys) if line.startswith("next: ")]
    assert following == ([] if told is None else [f'next: megarl generate {run.directory}/model{told} "a prompt"'])


@pytest.mark.parametrize(
    ("error", "printed", "told"),
    [
        (RuntimeError("died"), True, True),
        (RuntimeError("died"), False, False),
        (Stopped("the server is gone, and that is all"), True, False),
        (ConfigError("a: bad"), True, False),
    ],
)
def test_a_failed_run_names_the_logs_of_its_processes(
    error: Exception, printed: bool, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)), Run(config("train", tmp_path)) as run:
        if printed:
            (run.directory / LOGS / "rank-0.log").touch()
        raise error
    assert lines(capsys) == [f"the output of its processes is in {run.directory / LOGS}"] * told
