"""Report the state of a run and of its Slurm jobs, from the run's files and squeue."""

import math
import re
from pathlib import Path
from typing import Any

from megarl.checkpoints.steps import CHECKPOINTS, listing
from megarl.config import ConfigError, load, yaml_text
from megarl.config.run import MINUTES
from megarl.imports import find
from megarl.observe.run import METRICS
from megarl.observe.writers import read_json_lines
from megarl.slurm.commands import NoAnswer, call
from megarl.text.strict_json import read_plain
from megarl.verbs import VERBS

START, LOG, SUBMITTED = re.compile(r"(\d+)-(\d+)"), re.compile(r"(\d+)\.out"), re.compile(r"submitted-(\d+)")
MAX_BYTES = 1 << 20  # of a script


def show(run: Path) -> list[str]:
    """Return the lines that describe the run in a directory."""
    return [*_progress(run), *_saves(run), *_jobs(run)]


def _progress(run: Path) -> list[str]:
    rows = _rows(run)
    if not rows:
        return ["step: none yet"]
    latest: dict[str, float] = {}
    for row in rows:
        latest |= row
    numbers = {"reward": "reward/mean", "loss": "sft/loss", "tokens/s": "perf/tokens_per_second", "s/step": "perf/time_per_step"}
    figures = [f"{label} {latest[name]:.4g}" for label, name in numbers.items() if name in latest]
    finished = ", finished" if (run / "summary.json").is_file() else ""
    return [f"step: {latest['step']:g} of {_total(run) or '?'}{finished}{''.join(f', {one}' for one in figures)}"]


def _saves(run: Path) -> list[str]:
    entries = listing(run / CHECKPOINTS, contents=False) if (run / CHECKPOINTS).is_dir() else []
    last = next((entry for entry in entries if entry.saved is not None), None)
    lines = [f"last checkpoint: {'none' if last is None else last.path}"]
    every = _count(_config(run).get("save"), "every") or 0
    rows = _rows(run)
    if every and rows and not (run / "summary.json").is_file():
        step = int(rows[-1]["step"])
        due = (step // every + 1) * every
        seconds = [row["perf/time_per_step"] for row in rows if row["step"] > 0 and "perf/time_per_step" in row][-10:]
        when = f", in about {(due - step) * sum(seconds) / len(seconds):.0f} s" if seconds else ""
        lines.append(f"next expected: step {due}{when}")
    elif not every:
        minutes = _minutes(_config(run).get("save"))
        lines.append(f"next expected: {f'{minutes:g} minutes after the last' if minutes else 'when the run is stopped (save.every=0)'}")
    return lines


def _jobs(run: Path) -> list[str]:
    logs = run / "slurm"
    starts: dict[str, int] = {}
    for path in logs.glob("*-*"):
        if match := START.fullmatch(path.name):
            starts[match[1]] = max(starts.get(match[1], 0), int(match[2]))
    numbers = sorted({*starts, *(match[1] for path in logs.glob("*.out") if (match := LOG.fullmatch(path.name)))}, key=int)
    lines = [f"restarts: {sum(starts.values())}{f', logs in {logs}' if starts else ''}"]
    try:
        jobs = queued(run, "--states=all")
    except NoAnswer as error:
        return [*lines, f"jobs: {', '.join(numbers) or 'none'} ({error})"]
    for number, state, used, limit, nodes, why in jobs:
        lines.append(f"job {number}: {state.lower()}, {used} of {limit}, {nodes} nodes {why}".rstrip())
    return lines if jobs else [*lines, "jobs: none in the queue"]


def queued(run: Path, *options: str) -> list[list[str]]:
    """List squeue's jobs whose script lies in the run's directory, each as number, state, time used, time limit, nodes, reason."""
    rows = [line.split("|", 6) for line in call("squeue", "--noheader", "--me", *options, "--format=%i|%T|%M|%l|%D|%R|%o").splitlines()]
    return [fields for *fields, script in rows if Path(script).resolve().is_relative_to((run / "slurm").resolve())]


def _submitted(run: Path, pattern: str) -> str | None:
    """Search the script of the last submission, and return the pattern's group; None if it is not found."""
    scripts = [(int(match[1]), path) for path in (run / "slurm").glob("*/job.sbatch") if (match := SUBMITTED.fullmatch(path.parent.name))]
    script = read_plain(max(scripts)[1], MAX_BYTES).decode() if scripts else ""
    match = re.search(pattern, script, re.MULTILINE)
    return match[1] if match else None


def _rows(run: Path) -> list[dict[str, Any]]:
    path = run / METRICS
    return list(read_json_lines(path)) if path.is_file() else []


def _config(run: Path) -> dict[str, Any]:
    try:
        tree = yaml_text.read(read_plain(run / "config.yaml", yaml_text.MAX_BYTES).decode())
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _total(run: Path) -> int | None:
    """The number of steps of the whole run; None if its files do not say."""
    config = _config(run)
    verb = _submitted(run, r"^verb=(\w+)$") or next((name for name in VERBS if name in config), "")  # else from its section
    try:
        root: Any = find(VERBS[verb].config)
        return load(run / "config.yaml", [], root).total_steps
    except (ConfigError, KeyError):
        return None


def _minutes(section: Any) -> float:
    """The minutes between two saves of a run that saves none by steps; 0 if its section `save` does not say."""
    value = section.get("every_minutes", 0) if isinstance(section, dict) else 0
    value = MINUTES if value is None else value
    return value if type(value) in (int, float) and 0 < value < math.inf else 0.0


def _count(section: Any, key: str) -> int | None:
    """The positive integer under a key of a section; None if there is none."""
    value = section.get(key) if isinstance(section, dict) else None
    return value if type(value) is int and value > 0 else None
