"""Run `megarl train` once for each variant of a configuration and each seed, and compare the results side by side.

    python tools/ablation.py examples/vapo_ablation/variants.yaml [a.b=c ...] [--seeds 1 2]

The file names a `base` configuration and `variants`: {name: [overrides]}. Writes table.md, runs.csv and curves.png to the base's run
directory, and the runs below it. A finished run is not repeated; one that was made with other settings is refused. A run that fails is
named at the end (exit status 1), and the others continue.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megarl.config import ConfigError, TrainConfig, dump, load
from megarl.observe.writers import read_json_lines
from megarl.sandbox.kernel import end_with_parent

LAST = 5  # number of final steps whose rewards are averaged
COLUMNS = ("pass rate before", "pass rate", "greedy", f"reward, last {LAST} steps", "reward, all steps", "explained variance", "minutes")
CURVES = (
    ("reward", "reward/mean"),
    ("held-out pass rate, sampled", "eval/heldout/avg@1"),
    ("explained variance", "critic/explained_variance"),
)


@dataclass(frozen=True)
class Trial:
    """One variant with one seed."""

    variant: str
    seed: int
    config: TrainConfig
    command: list[str]

    @property
    def done(self) -> bool:
        """Whether the run is finished. Raises ConfigError if it was made with other settings."""
        kept = self.config.directory / "config.yaml"
        if not (self.config.directory / "summary.json").is_file():
            return False
        if kept.read_text() != dump(self.config):
            raise ConfigError(f"{self.config.directory}: was run with other settings (config.yaml); delete it to run it again")
        return True

    def rows(self) -> list[dict[str, float]]:
        return read_json_lines(self.config.directory / "metrics.jsonl")

    def result(self) -> dict[str, float | None]:
        """Return a number for each of COLUMNS; None for those that the run does not have."""
        summary: dict[str, Any] = json.loads((self.config.directory / "summary.json").read_text())
        learned = [row for row in self.rows() if "actor/grad_norm" in row]
        rewards = [row["reward/mean"] for row in learned]
        explained = [row["critic/explained_variance"] for row in learned[-LAST:] if "critic/explained_variance" in row]
        before, after = summary.get("pass_rate_start"), summary["pass_rate_end"]
        values = (
            before["sampled"] if before is not None else None,
            after["sampled"],
            after["greedy"],
            fmean(rewards[-LAST:]),
            fmean(rewards),
            fmean(explained) if explained else None,
            sum(summary["wall_s"].values()) / 60,
        )
        return dict(zip(COLUMNS, values, strict=True))


def trials(path: Path, seeds: Sequence[int], overrides: Sequence[str]) -> list[Trial]:
    """Return every variant for every seed, seed by seed. Raises ConfigError for bad settings."""
    if not path.is_file():
        raise ConfigError(f"config: no such file: {path}")
    tree = yaml.safe_load(path.read_text())
    if not isinstance(tree, dict) or set(tree) != {"base", "variants"} or not isinstance(tree["variants"], dict):
        raise ConfigError(f"config: {path} must hold `base: FILE.yaml` and `variants: {{name: [overrides]}}`")
    base = path.parent / str(tree["base"])
    all_trials = []
    for seed in seeds:
        for variant, changes in tree["variants"].items():
            name = f"{load(base, list(overrides), TrainConfig).name}/{re.sub(r'[^a-z0-9]+', '-', variant.lower())}-seed{seed}"
            given = [*overrides, *changes, f"name={name}", f"seed={seed}"]
            command = [sys.executable, "-m", "megarl.cli", "train", str(base), *given]
            all_trials.append(Trial(variant, seed, load(base, given, TrainConfig), command))
    return all_trials


def table(done: Sequence[Trial]) -> str:
    """Return a Markdown table with a row for each variant: the mean over its seeds and, of several, the lowest and the highest."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for variant in dict.fromkeys(trial.variant for trial in done):
        results = [trial.result() for trial in done if trial.variant == variant]
        lines.append(f"| {variant} | {' | '.join(_cell(column, [result[column] for result in results]) for column in COLUMNS)} |")
    seeds = ", ".join(str(seed) for seed in sorted({trial.seed for trial in done}))
    return "\n".join([*lines, "", f"Seeds {seeds}; the mean, and of several the lowest and the highest."]) + "\n"


def _cell(column: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    form = "{:.1f}" if column == "minutes" else "{:.3f}"
    text = form.format(fmean(known))
    return text if len(known) == 1 else f"{text} ({form.format(min(known))} - {form.format(max(known))})"


def write_rows(done: Sequence[Trial], path: Path) -> None:
    """Write one line per run."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["variant", "seed", *COLUMNS])
        for trial in done:
            writer.writerow([trial.variant, trial.seed, *trial.result().values()])


def draw(done: Sequence[Trial], picture: Path) -> None:
    """Draw curves by step (value pretraining included), one colour per variant, as the mean over its seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(CURVES), 5), layout="constrained")
    FigureCanvasAgg(figure)
    variants = list(dict.fromkeys(trial.variant for trial in done))
    for axis, (title, name) in zip(figure.subplots(1, len(CURVES)), CURVES, strict=True):
        for number, variant in enumerate(variants):
            steps = _mean_by_step([trial for trial in done if trial.variant == variant], name)
            style = {"color": "black", "linewidth": 2.5} if number == 0 else {"color": f"C{number - 1}"}
            axis.plot(list(steps), list(steps.values()), label=variant, **style)
        axis.set_title(title)
        axis.set_xlabel("steps that trained the policy")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(picture, dpi=80)


def _mean_by_step(same: Sequence[Trial], name: str) -> dict[int, float]:
    """Return a metric by step, numbered among the steps that trained the policy: 0 and below while it was frozen."""
    values_of: dict[int, list[float]] = {}
    for trial in same:
        rows = trial.rows()
        frozen = min(int(row["step"]) for row in rows if "actor/grad_norm" in row) - 1
        for row in rows:
            if name in row:
                step = 0 if "reward/mean" not in row and row["step"] == 0 else int(row["step"]) - frozen
                values_of.setdefault(step, []).append(row[name])
    return {step: fmean(values) for step, values in sorted(values_of.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", type=Path, metavar="VARIANTS.yaml")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="for every run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    given = parser.parse_intermixed_args()
    try:
        all_trials = trials(given.variants, given.seeds, given.overrides)
        failed = [trial for trial in all_trials if not trial.done and subprocess.run(trial.command, preexec_fn=end_with_parent).returncode]
    except ConfigError as error:
        print(f"ablation: error: {error}", file=sys.stderr)
        return 2
    done = [trial for trial in all_trials if trial not in failed]
    if done:
        place = done[0].config.directory.parent
        (place / "table.md").write_text(table(done))
        write_rows(done, place / "runs.csv")
        draw(done, place / "curves.png")
        print(table(done) + f"\nin {place}: table.md, runs.csv, curves.png")
    for trial in failed:
        print(f"ablation: failed: {trial.config.name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
