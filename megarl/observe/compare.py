"""`megarl compare RUN RUN ...`: runs side by side, as a table and one picture."""

import argparse
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megarl.config import yaml_text
from megarl.errors import ConfigError
from megarl.observe import run_record
from megarl.observe.curves import SCORES, held_out, series
from megarl.observe.report import LAG_SHARES
from megarl.observe.run_record import RunRecord
from megarl.observe.writers import read_json_lines
from megarl.text.display import escaped, one_line
from megarl.text.stdout import say
from megarl.text.strict_json import read_json, read_plain

SHOWN = (
    *("reward/mean", "sft/loss", "rm/accuracy", "dpo/accuracy", "actor/entropy", "response_length/mean", "actor/grad_norm"),
    *("critic/explained_variance", "training/logprob_gap_mean", *LAG_SHARES, "perf/tokens_per_second", "perf/time_per_step"),
)
MIDDLE = ("perf/",)  # prefixes of metrics whose median says more than the last value
MAX_BYTES = 64 << 20  # largest summary.json that is read
MAX_RUNS, MAX_PANELS, MAX_CHARS = 16, 60, 60  # MAX_CHARS: characters shown of a configuration value or a run's path


@dataclass(frozen=True)
class Ended:
    """The part of a finished run's summary.json that is compared."""

    wall_s: Mapping[str, float]  # of all starts, by phase
    alarms: Mapping[str, str]
    starts: int = 1  # earlier versions wrote neither this nor the next
    gpu_s: float = 0.0


_KINDS = TypeAdapter(Ended)


@dataclass(frozen=True)
class RecordedRun:
    """A run as read from its files."""

    name: str
    rows: list[dict[str, float]]
    config: Mapping[str, Any]  # dotted keys
    end: Ended | None
    record: RunRecord | None  # earlier versions wrote none

    @property
    def spent(self) -> tuple[float, float, int]:
        """The seconds of all starts so far, those of their GPUs, and the number of starts; 0 starts if nothing is known."""
        if self.end is not None:
            return sum(self.end.wall_s.values()), self.end.gpu_s, self.end.starts
        return (0.0, 0.0, 0) if self.record is None else (sum(self.record.wall_s.values()), self.record.gpu_s, len(self.record.starts))


def main(arguments: Sequence[str]) -> int:
    """Print the table and draw the picture. Raises ConfigError if a directory is not a run."""
    top = argparse.ArgumentParser(
        prog="megarl compare", description="Compares runs side by side: numbers, differences in their configurations, one picture."
    )
    top.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory; the run may still be going")
    top.add_argument("--picture", type=Path, default=Path("compare.png"), metavar="FILE", help="where the picture goes (compare.png)")
    args = top.parse_args(list(arguments))
    if not args.picture.suffix:
        raise ConfigError(f"compare: --picture {args.picture}: unknown picture format; end the name in one such as .png")
    if len(args.runs) > MAX_RUNS:
        raise ConfigError(f"compare: {len(args.runs)} runs, more than {MAX_RUNS}")
    runs = [read(path) for path in args.runs]
    say(*table(runs))
    try:
        with warnings.catch_warnings(action="ignore"):  # about characters missing from the font and numbers that no axis can show
            draw(runs, args.picture)
    except (OSError, ValueError) as error:
        raise ConfigError(f"compare: --picture: cannot write {args.picture}: {error}") from None
    say("", f"picture: {args.picture}")
    return 0


def read(path: Path) -> RecordedRun:
    """Read a run from its directory. ConfigError if it is not a run, or a file of it is invalid."""
    for name in ("metrics.jsonl", "config.yaml"):
        if not (path / name).is_file():
            raise ConfigError(f"compare: {path} is not a run: it has no {name}")
    try:
        config = dict(_flat(yaml_text.read(read_plain(path / "config.yaml", yaml_text.MAX_BYTES).decode()), ""))
        rows = read_json_lines(path / "metrics.jsonl")
        has_summary = (path / "summary.json").exists()
        end = _KINDS.validate_json(json.dumps(read_json(path / "summary.json", MAX_BYTES)), strict=True) if has_summary else None
        return RecordedRun(one_line(str(path), MAX_CHARS), rows, config, end, run_record.read(path))
    except ValidationError as error:
        fault = error.errors()[0]
        place = one_line(".".join(map(str, fault["loc"])), MAX_CHARS)
        raise ConfigError(f"compare: {path}: summary.json: {place}: {fault['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"compare: {path}: {error}") from None


def _flat(tree: Any, key: str) -> list[tuple[str, Any]]:
    if not isinstance(tree, dict) or not tree:
        return [(key, tree)]
    return [leaf for name, value in tree.items() for leaf in _flat(value, f"{key}.{name}" if key else name)]


def metrics(runs: Sequence[RecordedRun]) -> list[str]:
    """The names of the metrics to show, out of those that any of the runs has: held-out numbers first."""
    names = {name for run in runs for row in run.rows for name in row}
    return held_out(names, *SCORES, "accuracy", "loss") + [name for name in SHOWN if name in names]


def table(runs: Sequence[RecordedRun]) -> list[str]:
    """The lines of the table: numbers by run, then the configuration keys that differ."""
    heads = ["", *(run.name for run in runs)]
    rows = [["steps", *(f"{max((row['step'] for row in run.rows), default=0):.0f}" for run in runs)]]
    for name in metrics(runs):
        how = "median" if name.startswith(MIDDLE) else "first, last, highest" if name.startswith("eval/") else "last"
        rows.append([f"{name} ({how})", *(_cell(series(run.rows, name)[1], how) for run in runs)])
    rows.append(["seconds", *(_seconds(run) for run in runs)])
    if any(run.spent[1] for run in runs):
        rows.append(["GPU hours", *(f"{run.spent[1] / 3600:,.2f}" for run in runs)])
    rows.append(["alarms", *(", ".join(run.end.alarms if run.end else ()) or "none" for run in runs)])
    keys = sorted({key for run in runs for key in run.config})
    sections = [{key.partition(".")[0] for key in run.config} for run in runs]
    foreign = [key for key in keys if any(key not in run.config for run in runs)] if any(one != sections[0] for one in sections) else []
    keys = [key for key in keys if key not in foreign]
    differing = [key for key in keys if len({json.dumps(run.config.get(key), sort_keys=True) for run in runs}) > 1]
    rows += [
        [key, *(one_line(json.dumps(run.config.get(key)), MAX_CHARS) for run in runs)]
        for key in differing
        if key not in ("name", "run_dir")
    ]
    if foreign:
        rows.append([f"({len(foreign)} keys that only some have)", *("" for _ in runs)])
    width = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    return [escaped("  ".join(cell.ljust(size) for cell, size in zip(row, width, strict=True)).rstrip()) for row in [heads, *rows]]


def _seconds(run: RecordedRun) -> str:
    seconds, _, starts = run.spent
    parts = [f"{seconds:,.0f}" + (f" in {starts} starts" if starts > 1 else "")] if starts else []
    return ", ".join(parts if run.end else [*parts, "not finished"])


def _cell(values: Sequence[float], how: str) -> str:
    if not values:
        return "-"
    if how == "median":
        return f"{median(values):.4g}"
    return f"{values[0]:.4g}, {values[-1]:.4g}, {max(values):.4g}" if how.startswith("first") else f"{values[-1]:.4g}"


def draw(runs: Sequence[RecordedRun], picture: Path) -> None:
    """Draw a panel for each of the first MAX_PANELS metrics, with a line for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names, columns = metrics(runs)[:MAX_PANELS], 3
    lines = max(1, math.ceil(len(names) / columns))
    figure = Figure(figsize=(5 * columns, 3 * lines + 0.5 * len(runs)))
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, name in zip(axes, names, strict=False):
        for color, run in enumerate(runs):
            steps, values = series(run.rows, name)
            axis.plot(steps, values, color=f"C{color}", marker="." if len(steps) < 60 else None, label=run.name.replace("$", r"\$"))
        axis.set_title(escaped(name), parse_math=False)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="lower center", ncols=1, fontsize="small")
    figure.tight_layout(rect=(0, 0.5 * len(runs) / (3 * lines + 0.5 * len(runs)), 1, 1))
    figure.savefig(picture, dpi=80)
