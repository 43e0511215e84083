"""The curves of a run as one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

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
    phases = sorted({name for row in rows for name in row if name.startswith("timing_s/")})
    steps = [row["step"] for row in rows]
    axes[len(panels)].stackplot(steps, [[row.get(name, 0.0) for row in rows] for name in phases], labels=[name[9:] for name in phases])
    axes[len(panels)].set_title("seconds by phase")
    axes[len(panels)].legend(fontsize="small")
    for axis in axes[len(panels) + 1 :]:
        axis.set_visible(False)
    figure.savefig(picture, dpi=80)


def _series(rows: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    kept = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in kept], [value for _, value in kept]
