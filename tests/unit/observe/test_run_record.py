"""The seconds of all starts of a run add up, in its summary, its report and the comparison."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import TrainConfig, load
from megarl.observe import card, compare, run_record
from megarl.observe.phases import Phases
from megarl.observe.run import Run
from megarl.observe.run_record import RECORD, RunRecord, RunStart
from tests.unit.bad_input.cases import VERBS
from tests.unit.observe.test_trackers import step


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "job.yaml").write_text(VERBS["train"].format(runs=tmp_path / "runs", model="nowhere"))
    return load(tmp_path / "job.yaml", [], TrainConfig)


def spending(monkeypatch: pytest.MonkeyPatch, wall_s: Mapping[str, float]) -> None:
    """Let the starts that follow have taken these seconds."""
    monkeypatch.setattr(Phases, "total", lambda _: dict(wall_s))


def test_the_seconds_of_all_starts_add_up_those_of_killed_ones_too(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spending(monkeypatch, {"start": 10.0, "update": 90.0})
    with pytest.raises(SystemExit), Run(config) as run:
        run.starts_on(3)
        state = step(run, 1)
        step(run, 2)  # lost, and paid for
        raise SystemExit(143)
    directory = run.directory
    line = next(line for line in compare.table([compare.read(directory)]) if line.startswith("seconds"))
    assert line.split(maxsplit=1)[1] == "100, not finished"
    spending(monkeypatch, {"start": 5.0, "load": 5.0, "update": 30.0})
    with Run(config, state) as run:
        run.starts_on(2)
        step(run, 2)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["wall_s"] == {"start": 15.0, "update": 120.0, "load": 5.0} and summary["starts"] == 2
    assert summary["gpu_s"] == 3 * 100 + 2 * 40
    assert ", 140 s in 2 starts, 0.11 GPU hours</p>" in (directory / "report.html").read_text()
    rows = {line.split("  ")[0]: line for line in compare.table([compare.read(directory)])}
    assert rows["seconds"].endswith("140 in 2 starts") and rows["GPU hours"].endswith("0.11")
    assert "140.0" in capsys.readouterr().out


def test_a_fresh_run_counts_seconds_from_zero(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    spending(monkeypatch, {"update": 7.0})
    for _ in range(2):
        with Run(config) as run:
            step(run, 1)
    assert json.loads((run.directory / "summary.json").read_text())["wall_s"] == {"update": 7.0}
    assert (run.directory / "earlier-1" / RECORD).is_file()


@pytest.mark.parametrize("left", [None, b"", b'{"id": 3}', b"\xff"])
def test_a_missing_run_record_is_reported_and_the_run_resumes(
    left: bytes | None, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run(config) as run:
        state = step(run, 1)
    (run.directory / RECORD).unlink()
    if left is not None:
        (run.directory / RECORD).write_bytes(left)
    with Run(config, state):
        assert "run.json is missing or damaged: the seconds of earlier starts are not counted" in capsys.readouterr().err
    assert json.loads((run.directory / "summary.json").read_text())["starts"] == 1


def test_the_models_that_a_run_leaves_have_cards_with_the_steps_they_are_of(config: TrainConfig) -> None:
    with Run(config) as run:
        step(run, 1)
        step(run, 2)
        run.model_step = 1  # the best
        for name, kind in (("model", "Qwen3ForCausalLM"), ("critic", "Qwen3ForSequenceClassification")):
            (run.directory / name).mkdir()
            (run.directory / name / "config.json").write_text(json.dumps({"architectures": [kind]}))
    fronts = [yaml.safe_load((run.directory / name / card.CARD).read_text().split("---\n")[1]) for name in ("model", "critic")]
    assert [(front["megarl"]["steps"], front["pipeline_tag"]) for front in fronts] == [(1, "text-generation"), (2, "text-classification")]
    assert fronts[0]["megarl"]["commit"] == json.loads((run.directory / "summary.json").read_text())["commit"]
    (run.directory / "model" / card.CARD).write_text("# Our own\n")
    card.write(run.directory, run.directory / "model", 2)
    card.write(run.directory, run.directory / "critic", 1)
    assert (run.directory / "model" / card.CARD).read_text() == "# Our own\n"
    assert "after step 1 of a run" in (run.directory / "critic" / card.CARD).read_text()


def test_the_comparison_reads_runs_of_earlier_versions(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "summary.json").write_text('{"wall_s": {"update": 3.0}, "alarms": {}}')
    assert "3" in next(line for line in compare.table([compare.read(tmp_path)]) if line.startswith("seconds"))


def test_a_run_record_round_trips(tmp_path: Path) -> None:
    inputs: dict[str, Any] = {"data.train.path": {"": "ab"}}
    record = RunRecord("1f", "sft", inputs, 3, (RunStart(8, {"update": 1.5}), RunStart(0, {})))
    run_record.write(tmp_path, record)
    assert run_record.read(tmp_path) == record and record.gpu_s == 12.0
    assert record.spent({"update": 2.0}, 4).wall_s == {"update": 3.5}
