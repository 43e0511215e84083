"""Whether two runs are the same, bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.e2e.job import RESTARTED, STARVED, TIMED, Job


def numbers(job: Job) -> list[dict[str, Any]]:
    """Every row of the metrics, without what measures the clock, and what was replaced."""
    return [{name: value for name, value in row.items() if not name.startswith((*TIMED, RESTARTED))} for row in job.rows()]


def weights(job: Job, *models: str) -> dict[str, bytes]:
    """The final weights: every file of them."""
    folders = [job.runs / "job" / name for name in models]
    return {f"{folder.name}/{file.name}": file.read_bytes() for folder in folders for file in sorted(folder.glob("*.safetensors"))}


MEASURED = ("model", "commit", "starts", "wall_s", "gpu_s", "peak_rss_mb", "restarts")


def outcome(job: Job) -> dict[str, Any]:
    """What the summary says of the run as a whole, the place, the clock, the memory and what was replaced aside."""
    summary = json.loads((job.runs / "job" / "summary.json").read_text())
    summary["alarms"] = {name: text for name, text in summary.get("alarms", {}).items() if name not in STARVED}
    return {name: value for name, value in summary.items() if name not in MEASURED}


def assert_same(job: Job, straight: Job, *models: str) -> None:
    mine, theirs = numbers(job), numbers(straight)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one == other
    assert weights(straight, *models).keys() and weights(job, *models) == weights(straight, *models)
    assert outcome(job) == outcome(straight)


def cut_after(step: int, job: Job, runs: Path) -> Path:
    """A copy of a job's runs, into `runs`, with the checkpoints of its first `step` steps alone."""
    shutil.copytree(job.runs, runs)
    for save in (runs / "job" / "checkpoints").glob("step_*"):
        if int(save.name.removeprefix("step_")) > step:
            shutil.rmtree(save)
    (runs / "job" / "checkpoints" / "latest").unlink()
    return runs
