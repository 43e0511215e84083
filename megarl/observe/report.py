"""The curves of a run as one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.observe.writers import read_json_lines

# One panel each: its title and the metrics that it shows.
PANELS = (
    ("reward", ("reward/mean",)),
    ("held-out pass rate", ("eval/heldout/avg@1", "eval/heldout/greedy")),
    ("entropy", ("actor/entropy",)),
    ("response length", ("response_length/mean", "response_length/max")),
    ("gradient norm", ("actor/grad_norm",)),
    ("clipped share", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")),
    ("log-prob gap, engine to trainer", ("training/logprob_gap_mean", "training/logprob_gap_max")),
    ("loss", ("actor/pg_loss", "sft/loss")),
)
LOGARITHMIC = "log-prob gap, engine to trainer"


def draw(metrics: Path, picture: Path) -> None:
    """Draws metrics.jsonl into a PNG: a panel per group of metrics that the run has, and one of the seconds by phase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_json_lines(metrics)
    panels = [(title, names) for title, names in PANELS if any(name in row for row in rows for name in names)]
    columns = 3
    figure = Figure(figsize=(5 * columns, 3 * math.ceil((len(panels) + 1) / columns)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(math.ceil((len(panels) + 1) / columns), columns, squeeze=False).flatten()
    for axis, (title, names) in zip(axes, panels, strict=False):
        for name in names:
            steps, values = _series(rows, name)
            if steps:
                axis.plot(steps, values, marker="." if len(steps) < 60 else None, label=name)
        if title == LOGARITHMIC:
            axis.set_yscale("log")
        axis.set_title(title)
        axis.legend(fontsize="small")
    _phases(axes[len(panels)], [row for row in rows if row["step"] > 0 and "perf/time_per_step" in row])
    for axis in axes[len(panels) + 1 :]:
        axis.set_visible(False)
    figure.savefig(picture, dpi=80)


def _phases(axis: Any, rows: Sequence[dict[str, float]]) -> None:
    names = {name.removeprefix("timing_s/") for row in rows for name in row if name.startswith("timing_s/")}
    # "sync_move" is a part of "sync", already counted in it.
    shown = sorted(name for name in names if not any(name.startswith(f"{whole}_") for whole in names))
    axis.stackplot([row["step"] for row in rows], [[row.get(f"timing_s/{name}", 0.0) for row in rows] for name in shown], labels=shown)
    axis.set_title("seconds by phase")
    axis.legend(fontsize="small", loc="upper left", ncols=2)
    axis.set_ylim(0, 1.6 * max(row["perf/time_per_step"] for row in rows) if rows else 1)


def _series(rows: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    kept = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in kept], [value for _, value in kept]
