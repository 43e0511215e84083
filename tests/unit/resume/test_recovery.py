"""A run goes on after failures, so often as it may, from what it has saved; its numbers are then those of a run without any."""

import json
import shutil
import signal
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from xxhash import xxh3_128_hexdigest

from megarl.checkpoints.files import FileRecord
from megarl.checkpoints.steps import DAMAGED, damaged
from megarl.cluster.actor_group import WorkerDied, WorkerLate
from megarl.cluster.server import ProcessStalled
from megarl.config import ConfigError, SftConfig, load
from megarl.errors import ContentLost, DamagedFile, SaveError
from megarl.host import termination
from megarl.observe import restarts as restarts_module
from megarl.observe.metrics import Last
from megarl.observe.restarts import RESTART, Restart, Restarts
from megarl.observe.run import Run
from megarl.resume.copies import Copies
from megarl.resume.point import ResumePoint
from megarl.resume.recovery import Recoverable, newer, recovering
from megarl.resume.saving import Checkpoints
from tests.signals import taken

SFT = """
name: job
run_dir: {runs}
model: {{path: {runs}/none}}
cluster: {{gpus: false}}
log: {{tensorboard: false}}
data: {{train: {{type: file, path: a.jsonl}}, eval: {{type: file, path: b.jsonl}}}}
sft: {{steps: 9}}
"""


class Ranks:
    """What a run is done with, but for its ranks: these count how often they start again, and `failing` of these times they die."""

    def __init__(self, run: Run, most: int, failing: int = 0) -> None:
        self.run, self.restarts, self.copies = run, Restarts(most, run.restarted, run.note), Copies(peers=False)
        self.started, self._failing = list[bool](), failing

    def restart(self, beginning: bool) -> bool:
        self.started.append(beginning)
        if len(self.started) <= self._failing:
            raise WorkerDied("start: rank 0 died")
        return False


class Steps:
    """Nine steps, each with a row of metrics, a save after every third; before some of them, once each, something fails."""

    def __init__(self, ctx: Ranks, faults: dict[int, BaseException]) -> None:
        self._ctx, self._faults = ctx, faults
        self.saved: Any = None

    def __call__(self, resume: Any) -> None:
        for step in range(1 if resume is None else resume.step + 1, 10):
            if step in self._faults:
                raise self._faults.pop(step)
            self._ctx.run.log(step, {"number": Last(float(step)), "actor/grad_norm": Last(1.0)})
            if step % 3 == 0:
                self.saved = SimpleNamespace(step=step, run=json.loads(json.dumps(self._ctx.run.state())), copy=step)


def done(
    tmp_path: Path, faults: dict[int, BaseException], most: int, failing: int = 0
) -> tuple[list[dict[str, float]], list[bool], dict[str, Any]]:
    """The rows of such a run, how often its ranks started again (and from the beginning), and its summary."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "job.yaml").write_text(SFT.format(runs=tmp_path))
    with Run(load(tmp_path / "job.yaml", [], SftConfig)) as run:
        ctx = Ranks(run, most, failing)
        work = Steps(ctx, faults)
        recovering(work, None, Recoverable(ctx.run, ctx.restarts, ctx.copies, ctx.restart), lambda: work.saved)
    directory = tmp_path / "job"
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return rows, ctx.started, json.loads((directory / "summary.json").read_text())


def numbers(rows: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(row["step"], row["number"]) for row in rows]


def test_what_fails_is_done_again_from_the_last_save_and_told(tmp_path: Path) -> None:
    straight, started, summary = done(tmp_path / "straight", {}, 3)
    assert not started and summary["restarts"] == [] and len(straight) == 9
    faults: dict[int, BaseException] = {
        2: WorkerDied("update: rank 0 died"),  # nothing is saved yet
        6: ProcessStalled("sync: rank 1 has been stopped", seconds=7.5),
        9: torch.AcceleratorError("CUDA error: unspecified launch failure"),
        8: WorkerLate("update: no answer within 9 s from rank 1", 9.0),
        7: ContentLost("checkpoint: step 6 was not saved: responses that are under way are lost"),
    }
    rows, started, summary = done(tmp_path / "failed", faults, 6, failing=1)
    assert numbers(rows) == numbers(straight) and not faults
    assert started == [True, True, False, False, False, False]  # it died once more when it started
    told = summary["restarts"]
    assert [(one["kind"], one["step"], one["lost_steps"], one["detection_s"]) for one in told] == [
        ("rank", 0, 0, 0.0),
        ("rank", 3, 2, 7.5),
        ("rank", 6, 0, 0.0),
        ("rank", 6, 1, 9.0),
        ("rank", 6, 2, 0.0),
    ]
    assert told[0]["fault"] == "start: rank 0 died" and all(one["recovery_s"] >= 0 for one in told)
    events = {row["step"]: row for row in rows if RESTART in row}
    assert {step: row[f"{RESTART}/lost_steps"] for step, row in events.items()} == {1: 0.0, 4: 2.0, 7: 3.0}
    assert events[4][f"{RESTART}/detection_s"] == 7.5 and events[4][f"{RESTART}/rank"] == 1.0


def test_events_of_steps_that_are_done_again_stay(tmp_path: Path) -> None:
    faults: dict[int, BaseException] = {5: WorkerDied("a: rank 0 died"), 6: WorkerDied("b: rank 0 died")}
    rows, _, summary = done(tmp_path, faults, 2)
    assert [row["step"] for row in rows] == list(range(1, 10)) and len(summary["restarts"]) == 2
    assert rows[3][RESTART] == 2.0 and rows[3][f"{RESTART}/lost_steps"] == 3.0, "of both, one and two steps"


@pytest.mark.parametrize("most", [0, 2])
def test_more_than_the_restarts_of_a_day_end_the_run(
    most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: dict[int, BaseException] = {step: WorkerDied(f"step {step}: rank 0 died") for step in (4, 5, 7)}
    with pytest.raises(WorkerDied, match=r"^step 7: " if most else r"^step 4: "):
        done(tmp_path / "ended", faults, most)
    assert ("are the most that cluster.restarts=2 allows" in capsys.readouterr().err) == (most == 2)
    clock = iter(range(0, 10_000_000, 50_000))
    monkeypatch.setattr(restarts_module.time, "monotonic", lambda: float(next(clock)))
    budget = Restarts(1, lambda _: None, lambda _: None)
    assert [budget.allow(WorkerDied("")) for _ in range(4)] == [True, False, True, False], "the next day"


def test_what_no_restart_mends_ends_the_run(tmp_path: Path) -> None:
    for number, fault in enumerate((FloatingPointError("nan"), ProcessStalled("update: Ray's gcs_server has ended", session=True))):
        with pytest.raises(type(fault)):
            done(tmp_path / str(number), {5: fault}, 3)


def test_a_run_that_was_to_end_does_not_start_its_ranks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "asked", lambda: signal.SIGTERM)
    with pytest.raises(termination.Terminated) as stop:
        done(tmp_path, {5: WorkerDied("update: rank 0 died")}, 3)
    assert stop.value.code == 143
    assert stop.value.message == "SIGTERM, after update: rank 0 died; started again, the run resumes from what it has saved"
    assert not (tmp_path / "job" / "summary.json").exists()


def test_a_signal_while_ranks_start_again_is_taken_once_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[bool]()

    def restart(self: Ranks, beginning: bool) -> bool:
        signal.raise_signal(signal.SIGTERM)
        begun.append(beginning)
        return False

    monkeypatch.setattr(Ranks, "restart", restart)
    with taken(), pytest.raises(termination.Terminated) as stop:
        done(tmp_path, {5: WorkerDied("update: rank 0 died")}, 3)
    assert stop.value.code == 143 and begun == [False]
    said = capsys.readouterr()
    assert "SIGTERM: the run ends; a second signal ends it at once" in said.err and "resumed after" not in said.out + said.err


def test_a_restart_says_what_it_was() -> None:
    told = list[Restart]()
    budget = Restarts(1, told.append, lambda _: None)
    with pytest.raises(WorkerLate), budget.recovery("engine", EOFError("gone")):
        raise WorkerLate("start: no answer")
    assert not told, "it has not succeeded"
    with budget.recovery("engine", WorkerLate("generate: no answer within 4 s from engine 1", 4.0)) as restart:
        restart.kind = "node"
    [one] = told
    assert (one.kind, one.detection_s) == ("node", 4.0) and one.fault.startswith("generate: ")


class Saved:
    """Checkpoints of steps 1, 2 and 3 with a policy and a critic, which lie in different folders; `flipped` files have changed."""

    def __init__(self, root: Path, flipped: Collection[str]) -> None:
        self._root = root
        for step in (1, 2, 3):
            for folder in ("checkpoints", "checkpoints-critic"):
                (path := root / folder / f"step_{step:06d}").mkdir(parents=True)
                name = f"{folder}/{path.name}"
                (path / "a").write_text("other" if name in flipped else "right")

    def find(self) -> Any:
        good = [step for step in (3, 2, 1) if not any((one.path / DAMAGED).exists() for one in self.point(step).steps.values())]
        if not good:
            raise ConfigError("none is intact")
        return self.point(good[0])

    def point(self, step: int) -> Any:
        folders = [self._root / folder / f"step_{step:06d}" for folder in ("checkpoints", "checkpoints-critic")]
        record = FileRecord(5, xxh3_128_hexdigest(b"right"))
        steps = {path.parent.name: SimpleNamespace(path=path, files={path / "a": record}) for path in folders}
        return SimpleNamespace(steps=steps, run=step, copy=None)


def load_steps(resume: Any) -> None:
    """What ranks do with a checkpoint: the first damaged file ends the load."""
    for step in resume.steps.values():
        for file, fault in damaged(step.files).items():
            raise DamagedFile(str(file), fault)


def test_a_checkpoint_that_has_changed_is_marked_and_the_one_before_taken(tmp_path: Path) -> None:
    """Of three one has changed in the policy's files and one in the critic's; then there is none that has not."""
    bad = ["checkpoints/step_000003", "checkpoints-critic/step_000002"]
    saved, rewound, loaded = Saved(tmp_path / "two", bad), list[int](), list[int]()
    ctx: Any = SimpleNamespace(run=SimpleNamespace(rewind=rewound.append), copies=SimpleNamespace(newest=lambda: None))

    def work(resume: Any) -> None:
        load_steps(resume)
        loaded.append(resume.run)

    recovering(work, saved.find(), ctx, saved.find)
    assert (rewound, loaded) == ([2, 1], [1])
    assert {path.parent: path.read_text().startswith("a: flipped: ") for path in (tmp_path / "two").rglob(DAMAGED)} == {
        tmp_path / "two" / name: True for name in bad
    }
    saved = Saved(tmp_path / "three", [*bad, "checkpoints/step_000001"])
    with pytest.raises(ConfigError, match="none is intact"):
        recovering(work, saved.find(), ctx, saved.find)
    assert loaded == [1]


def test_a_damaged_checkpoint_that_was_saved_again_is_taken(tmp_path: Path) -> None:
    """When the ranks fail after that."""
    saved, loaded = Saved(tmp_path, ["checkpoints/step_000003"]), list[int]()
    run: Any = SimpleNamespace(rewind=lambda _: 0, phase=lambda _: nullcontext())
    budget = Restarts(1, lambda _: None, lambda _: None)
    ctx: Any = SimpleNamespace(run=run, copies=Copies(peers=False), restarts=budget, restart=lambda _: False)

    def work(resume: Any) -> None:
        load_steps(resume)
        loaded.append(resume.run)
        if resume.run == 2:
            shutil.rmtree(step := tmp_path / "checkpoints" / "step_000003")
            step.mkdir()
            (step / "a").write_text("right")
            raise WorkerDied("update: rank 0 died")

    recovering(work, saved.find(), ctx, saved.find)
    assert loaded == [2, 3]


@pytest.mark.parametrize(("file", "says"), [("checkpoints/step_000003/a", "on this machine it is intact$"), ("weights/a", "flipped$")])
def test_a_damaged_file_that_no_earlier_checkpoint_helps_against_ends_the_run(tmp_path: Path, file: str, says: str) -> None:
    """One that is intact as this machine reads it, and one of weights to start from, which are in no checkpoint."""
    saved = Saved(tmp_path, [])
    ctx: Any = SimpleNamespace(copies=SimpleNamespace(newest=lambda: None))

    def work(_: Any) -> None:
        raise DamagedFile(str(tmp_path / file), "flipped")

    with pytest.raises(DamagedFile, match=says):
        recovering(work, saved.find(), ctx, saved.find)
    with pytest.raises(DamagedFile, match="flipped$"):
        recovering(work, None, ctx, saved.find)


def test_of_copy_and_checkpoint_the_later_counts() -> None:
    """A copy finds no room for many steps, say, while checkpoints are written."""
    copied = (4, {"progress": {"step": 4}, "run": {}})
    copy = ResumePoint({}, {"step": 4}, {}, copy=4)
    for step, expected in ((3, copy), (4, copy), (5, ResumePoint({}, {"step": 5}, {}))):
        saved = ResumePoint({}, {"step": step}, {})
        assert newer(copied, lambda: saved) == expected  # noqa: B023
        assert newer(None, lambda: saved) == saved  # noqa: B023
    assert newer(copied, lambda: None) == copy

    def all_damaged() -> ResumePoint:
        raise ConfigError("all are damaged")

    assert newer(copied, all_damaged) == copy
    with pytest.raises(ConfigError):
        newer(None, all_damaged)


@pytest.mark.parametrize("failing", ["", "checkpoint", "wait_for_save"])
def test_what_could_not_be_saved_is_not_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setattr(termination, "asked", lambda: signal.SIGTERM)
    (tmp_path / "job.yaml").write_text(SFT.format(runs=tmp_path))
    config = load(tmp_path / "job.yaml", ["save.on_failure=continue"], SftConfig)
    begun = list[str]()

    class Trained:
        folders: dict[str, str] = {}

        def checkpoint(self, *given: Any) -> None:
            if failing == "checkpoint":
                raise SaveError("disk full")
            begun.append("save")

        def wait_for_save(self) -> None:
            if failing == "wait_for_save" and begun:
                raise SaveError("disk full")

    state = SimpleNamespace(state=lambda: {"step": 5}, files=dict, step=5)
    with Run(config) as run:
        saves: Any = Checkpoints(config, "sft", run, Trained())  # type: ignore[arg-type]
        with pytest.raises(termination.Terminated) as stop:
            saves.stop_where_asked(state)
    expected = "NOT saved at step 5, see above" if failing else "saved at step 5"
    assert f": {expected}; " in stop.value.message
