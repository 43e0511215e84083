"""A run is one run in its trackers, however often it is started; a tracker that fails ends no run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError, LogSettings, TrainConfig, load
from megarl.observe.metrics import Mean
from megarl.observe.run import Run
from megarl.observe.run_record import RECORD
from megarl.observe.writers import TRACKERS, check, read_json_lines
from tests.unit.bad_input.cases import VERBS

REASON = "not installed; a folder of `pip install --target` on PYTHONPATH will do"


class Calls:
    """Stands in for the package wandb, and records how it is called."""

    def __init__(self) -> None:
        self.opened, self.rows, self.ended = list[dict[str, Any]](), list[dict[str, float]](), list[int]()
        self.broken = ""  # "init" or "log": which call fails

    def init(self, **given: Any) -> Calls:
        if self.broken == "init":
            raise TimeoutError("no answer\nwithin 90 s")
        self.opened.append(given)
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, row: dict[str, float]) -> None:
        if self.broken == "log":
            raise ConnectionError("reset")
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    calls, module = Calls(), ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None, origin="a test")
    module.init = calls.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    yield calls


def config(place: Path, *overrides: str) -> TrainConfig:
    (place / "job.yaml").write_text(VERBS["train"].format(runs=place / "runs", model="nowhere"))
    return load(place / "job.yaml", list(overrides), TrainConfig)


def step(run: Run, number: int) -> dict[str, Any]:
    """Take a step; return the state after it."""
    run.log(number, {"reward/mean": Mean(float(number), 1.0)})
    return run.state()


def test_all_starts_of_a_run_are_one_wandb_run_and_a_new_run_is_another(tmp_path: Path, wandb: Calls) -> None:
    settings = config(tmp_path, "log.trackers=[wandb]", "log.project=thirty", "log.entity=team", "log.group=g", "log.tags=[a, b]")
    with Run(settings) as run:
        state = step(run, 1)
    with pytest.raises(RuntimeError, match="killed"), Run(settings, state) as run:
        step(run, 2)
        run.rewind(state)  # ranks have failed
        step(run, 2)
        raise RuntimeError("killed")
    with Run(config(tmp_path, "log.trackers=[wandb]", "log.notes=other")):
        pass
    first, *others, last = wandb.opened
    assert [one["id"] for one in others] == [first["id"]] * 2 and last["id"] != first["id"] and len(first["id"]) >= 8
    assert {one["resume"] for one in wandb.opened} == {"allow"}
    known = {name: first[name] for name in ("project", "entity", "group", "tags", "notes", "name", "mode")}
    assert known == dict(project="thirty", entity="team", group="g", tags=["a", "b"], notes=None, name="job", mode="offline")
    assert (last["project"], last["notes"]) == ("megarl", "other")
    assert [row["step"] for row in wandb.rows] == [1, 2, 2] and wandb.rows[-1]["reward/mean"] == 2.0
    assert wandb.ended == [0, 0, 1, 0], "the start that was killed has failed"


@pytest.mark.parametrize("broken", ["log", "init"])
def test_a_failing_tracker_is_reported_once_and_ends_no_run(
    broken: str, tmp_path: Path, wandb: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, "log.trackers=[wandb]")
    with Run(settings) as run:
        state = step(run, 1)
    wandb.broken = broken
    with Run(settings, state) as run:
        step(run, 2)
        step(run, 3)
    said = {"log": "ConnectionError: reset", "init": "TimeoutError: no answer within 90 s"}[broken]
    told = f"log.trackers: wandb misses numbers, which metrics.jsonl has: {said}"
    assert capsys.readouterr().err.count(told) == 1
    assert json.loads((run.directory / "summary.json").read_text())["alarms"]["tracker_failed"] == told
    assert [row["step"] for row in read_json_lines(run.directory / "metrics.jsonl")] == [1, 2, 3]


def test_a_tracker_that_cannot_be_opened_is_refused_when_the_run_begins(tmp_path: Path, wandb: Calls) -> None:
    wandb.broken = "init"
    with (
        pytest.raises(ConfigError, match=r"^log\.trackers: wandb: TimeoutError: no answer within 90 s$"),
        Run(config(tmp_path, "log.trackers=[wandb]")),
    ):
        pass


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_package_that_is_missing_is_refused_with_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = rf"^log\.trackers: {name}: the package {name} is not installed \(pip install {name}\)$"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=message):
        check(LogSettings(trackers=[name]))  # type: ignore[list-item]
    (tmp_path / name).mkdir()  # what W&B leaves where it has run offline
    with pytest.raises(ConfigError, match=message):
        check(LogSettings(trackers=[name]))  # type: ignore[list-item]


def test_mlflow_is_refused_if_nothing_says_where_its_server_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(__spec__=ModuleSpec("mlflow", None, origin="a test")))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"^log\.trackers: mlflow: the environment variable MLFLOW_TRACKING_URI is not set$"):
        check(LogSettings(trackers=["mlflow"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("log.wandb=true", r"^log\.wandb: unknown key \(here it is log\.trackers: \[wandb\]\)$"),
        ("log.wandb_project=p", r"^log\.wandb_project: unknown key \(here it is log\.project\)$"),
        ("log.wandb_entity=e", r"^log\.wandb_entity: unknown key \(here it is log\.entity\)$"),
        ("log.group=g", r"^log\.group=g: log\.trackers names no tracker that would show it$"),
        ("log={trackers: [mlflow], entity: e}", r"^log\.entity=e: only Weights & Biases has entities"),
        ("log.trackers=[wandb, wandb]", r"^log\.trackers=.*: names a tracker twice$"),
        ("log.trackers=[comet]", r"^log\.trackers\.0: "),
    ],
)
def test_tracker_keys_that_no_tracker_reads_are_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, override)


def two_starts(settings: TrainConfig) -> str:
    """Start a run, and again from its first step; return its id."""
    with Run(settings) as run:
        state = step(run, 1)
    with Run(settings, state) as run:
        step(run, 2)
    record: dict[str, Any] = json.loads((run.directory / RECORD).read_text())
    return str(record["id"])


@pytest.mark.skipif(find_spec("wandb") is None, reason=REASON)
def test_weights_and_biases_records_both_starts_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    one = two_starts(config(tmp_path, "log.trackers=[wandb]", "log.group=g", "log.tags=[a]", "log.notes=n"))
    recorded = [path.name for path in (tmp_path / "runs" / "job" / "wandb").glob("offline-run-*/run-*.wandb")]
    assert recorded == [f"run-{one}.wandb"] * 2


@pytest.mark.skipif(find_spec("mlflow") is None, reason=REASON)
def test_mlflow_has_one_run_with_the_numbers_of_both_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    one = two_starts(config(tmp_path, "log.trackers=[mlflow]", "log.project=p", "log.group=g", "log.tags=[a]", "log.notes=n"))
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert found.info.run_name == "job" and found.info.status == "FINISHED"
    tags = found.data.tags
    assert (tags["megarl.run_id"], tags["group"], tags["a"], tags["mlflow.note.content"]) == (one, "g", "true", "n")
    assert found.data.params["train.steps"] == "3"
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert sorted((metric.step, metric.value) for metric in history) == [(1, 1.0), (2, 2.0)]
