"""How a run stands, whatever lies in its directory: one line says what cannot be read, or it is left out."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from tests.e2e.job import RL

METRICS = b'{"step": 3, "reward/mean": 0.5}\n'
GOOD = RL.format(runs="runs", model="nowhere").replace("steps: 3,", "steps: 9,") + "save: {every: 5}\n"


def status(run: Path) -> int:
    return main(["slurm", "status", str(run)])


def run(here: Path, config: str | bytes | Callable[[Path], None]) -> Path:
    """A run's directory after three steps."""
    (here / "metrics.jsonl").write_bytes(METRICS)
    place = here / "config.yaml"
    if callable(config):
        config(place)
    else:
        place.write_bytes(config.encode() if isinstance(config, str) else config)
    return here


def test_status_reads_step_and_next_checkpoint_from_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(run(tmp_path, GOOD)) == 0
    shown = capsys.readouterr().out
    assert "step: 3 of 9, reward 0.5\n" in shown and "next expected: step 5\n" in shown


@pytest.mark.parametrize(("verb", "of"), [("train", 13), ("value", 4)])
def test_status_counts_the_steps_of_value_pretraining(verb: str, of: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slurm" / "submitted-1").mkdir(parents=True)
    (tmp_path / "slurm" / "submitted-1" / "job.sbatch").write_text(f"verb={verb}\n")
    assert status(run(tmp_path, GOOD.replace("gspo}", "vapo}") + "critic: {pretrain_steps: 4}\n")) == 0
    assert f"step: 3 of {of}, reward 0.5\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "config",
    [
        b"name: \xff",
        "train: {steps: x}\nsave: {every: x}",
        "train: {steps: [1]}\nsave: [1]",
        "train: {steps: }\nsave:",
        os.mkfifo,
        Path.mkdir,
    ]
    + ["train: {steps: .inf}\nsave: {every: .nan}", "- 1"],
)
def test_status_survives_an_unreadable_configuration(
    config: str | bytes | Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(run(tmp_path, config)) == 0
    shown = capsys.readouterr().out
    assert "step: 3 of ?, reward 0.5\n" in shown and "next expected: when the run is stopped" in shown


def test_status_ignores_files_that_are_no_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("submitted-x", "submitted-2"):
        (tmp_path / "slurm" / name).mkdir(parents=True)
        (tmp_path / "slurm" / name / "job.sbatch").write_text("#SBATCH --job-name=x\n")
    (tmp_path / "slurm" / "\N{SUPERSCRIPT TWO}.out").touch()
    assert status(run(tmp_path, GOOD)) == 0
    assert "restarts: 0\n" in capsys.readouterr().out


def test_a_slurm_command_that_cannot_start_is_a_failure_not_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "squeue").touch(mode=0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert status(run(tmp_path, GOOD)) == 1
    assert capsys.readouterr().err == "megarl: failed: Stopped: slurm: squeue: Permission denied\n"
