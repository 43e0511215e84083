"""The loop of the supervised stages with ranks that only count: when it ends, and whose model it leaves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.algorithms.reward_model import BradleyTerry
from megarl.config import ConfigError, RmConfig, SftConfig, load
from megarl.loops import supervised as learning
from megarl.observe.metrics import Last, Metric
from megarl.resume.best import Best
from megarl.resume.copies import Copies
from tests.e2e.lab import in_this_session
from tests.unit.examples.test_configurations import EXAMPLES

RM = """
name: job
run_dir: {runs}
model: {{path: {runs}/none}}
cluster: {{gpus: false}}
data: {{train: {{type: file, path: a.jsonl}}, eval: {{type: file, path: b.jsonl}}}}
rm: {{steps: 12, eval_every: 2, batch_size: 2, patience: 2}}
"""


class Counting:
    """Ranks whose model is the number of steps that it has taken, and whose held-out accuracy is given."""

    folders, timeout_s, machines, copies = {"model": "checkpoints"}, 60.0, (), Copies(peers=False)

    def __init__(self, accuracy: Sequence[float]) -> None:
        self._accuracy, self._steps = accuracy, 0

    def train(self, plan: Any) -> dict[str, Metric]:
        self._steps += 1
        return {"rm/loss": Last(0.5)}

    def measure(self, plan: Any) -> dict[str, Metric]:
        return {"rm/accuracy": Last(self._accuracy[self._steps // 2]), "rm/loss": Last(1.0 - self._steps / 100)}

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "steps").write_text(str(self._steps))

    def wait_for_save(self) -> None: ...

    def restart(self, beginning: bool) -> bool:
        raise AssertionError("no rank fails")


def learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accuracy: Sequence[float], *overrides: str
) -> tuple[Path, Mapping[str, float]]:
    """A run's directory, and the numbers of the model that it leaves."""
    monkeypatch.setattr(learning, "start_supervised", lambda *_, **__: Counting(accuracy))
    (tmp_path / "job.yaml").write_text(RM.format(runs=tmp_path))
    config = load(tmp_path / "job.yaml", list(overrides), RmConfig)
    plan: Any = SimpleNamespace(tokens=8)
    finished = list[tuple[Path, Mapping[str, float]]]()
    with in_this_session():
        learning.learn(learning.Stage(config, BradleyTerry(), lambda *_: plan, plan, lambda *left: finished.append(left)), 8)
    [(model, numbers)] = finished
    return model.parent, numbers


def steps_of(directory: Path) -> tuple[int, int]:
    """Steps taken, and those of the model that was left."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return max(row["step"] for row in rows), int((directory / "model" / "steps").read_text())


def test_patience_ends_a_stage_with_its_best_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, numbers = learned(tmp_path, monkeypatch, [0.5, 0.7, 0.9, 0.8, 0.85, 0.95, 0.95])
    assert steps_of(directory) == (8, 4) and numbers["rm/accuracy"] == 0.9
    assert json.loads((directory / "summary.json").read_text())["results"]["held-out later"]["rm/accuracy"] == 0.85
    assert [path.name for path in (directory / "best").iterdir()] == ["000004"]


def test_a_run_that_is_done_and_started_again_leaves_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy, saved = [0.5, 0.7, 0.9, 0.8, 0.85, 0.95, 0.95], list[Any]()
    keep = lambda self, state: saved.append(json.loads(json.dumps([state.state(), self._run.state()])))  # noqa: E731
    monkeypatch.setattr(learning.Checkpoints, "save", keep)
    directory, _ = learned(tmp_path, monkeypatch, accuracy, "save.every=8")
    [(progress, run)] = saved
    monkeypatch.setattr(learning, "resume_point", lambda *_: SimpleNamespace(progress=progress, run=run, copy=8))
    monkeypatch.setattr(learning.Checkpoints, "load", lambda self, resume, state: state.restore(resume.progress))
    again, numbers = learned(tmp_path, monkeypatch, accuracy, "save.every=8")
    assert again == directory and steps_of(directory) == (8, 4) and numbers["rm/accuracy"] == 0.9


def test_of_two_with_one_accuracy_the_lower_loss_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = learned(tmp_path, monkeypatch, [0.5, 0.7, 0.9, 0.9, 0.8, 0.9, 0.9])
    assert steps_of(directory) == (12, 12)


def test_without_patience_the_last_model_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, numbers = learned(tmp_path, monkeypatch, [0.5, 0.9, 0.8, 0.8, 0.8, 0.8, 0.6], "rm.patience=0")
    assert steps_of(directory) == (12, 12) and numbers["rm/accuracy"] == 0.6


def test_a_run_that_goes_on_knows_its_best_model(tmp_path: Path) -> None:
    course = learning.SupervisedState(learning.Sampler(8, 1, shuffle=True), Best(tmp_path, None))
    course.step = 4
    assert course.improves(0.9, 0.3)
    course.step = 6
    assert not course.improves(0.8, 0.2)
    state = json.loads(json.dumps(course.state()))
    for there in (False, True):
        again = learning.SupervisedState(learning.Sampler(8, 1, shuffle=True), Best(tmp_path, None))
        if there:
            (tmp_path / "000004").mkdir()
        again.restore(state)
        assert (again.best.waited, again.improves(0.85, 0.1)) == ((1, False) if there else (0, True))
    assert again.best.waited == 2 and again.best.path == tmp_path / "000004"


def test_patience_without_evaluations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rm.yaml").write_text(RM.format(runs=tmp_path))
    with pytest.raises(ConfigError, match="^rm.patience=2: rm.eval_every=0 runs no evaluations during training"):
        load(tmp_path / "rm.yaml", ["rm.eval_every=0"], RmConfig)
    with pytest.raises(ConfigError, match="^sft.patience=3: there is no data.eval to measure on"):
        load(EXAMPLES / "quickstart" / "sft.yaml", ["data.eval=null", "sft.eval_every=2", "sft.patience=3"], SftConfig)
