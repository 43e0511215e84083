"""The curves of a run as one picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.observe.alarms import BIAS, PROFILE
from megarl.observe.curves import SCORES, held_out, series
from megarl.observe.writers import read_json_lines

LAG_SHARES = tuple(f"rollout/lag_share_from_{1 << octave}" for octave in range(11))  # rollout.max_lag is at most 1024
HELD_OUT = "held-out score"
# One panel each: the title, and the metrics that it shows.
PANELS: dict[str, Sequence[str]] = {
    "reward": ("reward/mean",),
    "share of groups without signal": ("frac_reward_zero_std",),
    HELD_OUT: (),  # depends on the run's sets
    "accuracy": ("rm/accuracy", "eval/heldout/rm/accuracy", "dpo/accuracy", "eval/heldout/dpo/accuracy", "eval/heldout/sft/accuracy"),
    "margin": ("rm/gap", "eval/heldout/rm/gap", "dpo/margin", "eval/heldout/dpo/margin"),
    "held-out log-prob minus the reference's": ("eval/heldout/dpo/chosen_shift", "eval/heldout/dpo/rejected_shift"),
    "entropy": ("actor/entropy",),
    "KL: of an update, to the reference": ("actor/ppo_kl", "actor/reference_kl", "actor/kl_loss"),
    "KL to the teacher, per token": ("distillation/reverse_kl", "distillation/k3_kl"),
    "response length": ("response_length/mean", "response_length/max"),
    "gradient norm": ("actor/grad_norm", "rm/grad_norm"),
    "clipped share": ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/pg_gated"),
    "share of tokens by lag, in updates": LAG_SHARES,
    "log-prob gap, engine to trainer": ("training/logprob_gap_mean", "training/logprob_gap_max"),
    "tokens per second": ("perf/tokens_per_second",),
    "loss": ("actor/pg_loss", *(f"{held}{stage}/loss" for stage in ("sft", "rm", "dpo") for held in ("", "eval/heldout/"))),
    "value loss": ("critic/vf_loss",),
    "explained variance": tuple(f"critic/explained_variance{part}" for part in ("", "_early", "_middle", "_late")),
    f"bias of the value by position (alarm above {BIAS:g})": ("critic/position_bias",),
}
LOGARITHMIC = "log-prob gap, engine to trainer"


# Panels by position in the response: the title, and the quantities that are shown for the first and the last step.
PROFILES = (("value and return by token", ("value", "return")), ("advantage by token", ("advantage",)))


def draw(metrics: Path, picture: Path) -> None:
    """Draw metrics.jsonl as a PNG: a panel per group of metrics that the run has, the critic by position, the seconds by phase."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    rows = read_json_lines(metrics)
    keys = {name for row in rows for name in row}
    panels = [(title, names) for title, names in {**PANELS, HELD_OUT: held_out(keys, *SCORES)}.items() if not keys.isdisjoint(names)]
    profiled = [row for row in rows if any(name.startswith(PROFILE) for name in row)]
    profiles = PROFILES if profiled else ()
    columns, used = 3, len(panels) + len(profiles) + 1
    lines = math.ceil(used / columns)
    figure = Figure(figsize=(5 * columns, 3 * lines))
    # Fixed margins, in inches: finding tight ones takes matplotlib as long as all the rest.
    figure.subplots_adjust(0.75 / 15, 0.3 / (3 * lines), 1 - 0.1 / 15, 1 - 0.3 / (3 * lines), wspace=0.2, hspace=0.25)
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis in axes:
        _fix(axis)
    for axis, (title, names) in zip(axes, panels, strict=False):
        for name in names:
            steps, values = series(rows, name)
            if steps:
                axis.plot(steps, values, marker="." if len(steps) < 60 else None, label=name)
        if title == LOGARITHMIC:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(LogFormatter())  # typesetting powers as formulas takes as long as all other text
            axis.yaxis.set_minor_formatter(LogFormatter())
        axis.set_title(title, y=1.0)
        axis.legend(fontsize="small")
    for axis, (title, names) in zip(axes[len(panels) :], profiles, strict=False):
        _by_position(axis, title, names, profiled[0], profiled[-1])
    _phases(axes[used - 1], [row for row in rows if row["step"] > 0 and "perf/time_per_step" in row])
    for axis in axes[used:]:
        axis.set_visible(False)
    figure.savefig(picture, dpi=80)


def _fix(axis: Any) -> None:
    """Fix the positions of the labels, as `y=1.0` does for titles: finding free ones takes half of the drawing time."""
    axis.xaxis.set_label_coords(0.5, -0.1)
    axis.yaxis.set_label_coords(-0.1, 0.5)


def _by_position(axis: Any, title: str, names: Sequence[str], first: dict[str, float], last: dict[str, float]) -> None:
    """Plot means over tokens 1, 2-3, 4-7, ... of the responses, for the first step (dashed) and the last."""
    for row, style in ((first, "--"), (last, "-")):
        for color, name in enumerate(names):
            start = f"{PROFILE}{name}_from_"
            means = sorted((int(key.removeprefix(start)), value) for key, value in row.items() if key.startswith(start))
            label = f"{name}, step {row['step']:.0f}"
            axis.plot(*zip(*means, strict=True), style, marker=".", color=f"C{color}", alpha=0.5 if style == "--" else 1, label=label)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_title(title, y=1.0)
    axis.legend(fontsize="small")


def _phases(axis: Any, rows: Sequence[dict[str, float]]) -> None:
    names = {name.removeprefix("timing_s/") for row in rows for name in row if name.startswith("timing_s/")}
    # "sync_move" is a part of "sync", and already counted in it.
    phases = sorted(name for name in names if not any(name.startswith(f"{whole}_") for whole in names))
    axis.stackplot([row["step"] for row in rows], [[row.get(f"timing_s/{name}", 0.0) for row in rows] for name in phases], labels=phases)
    axis.set_title("seconds by phase", y=1.0)
    axis.legend(fontsize="small", loc="upper left", ncols=2)
    axis.set_ylim(0, 1.6 * max(row["perf/time_per_step"] for row in rows) if rows else 1)
