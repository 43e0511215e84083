"""Run the examples for several seeds, check every figure against its range, and write the tables of examples/figures.md.

    python tools/run_examples.py [--only PATTERN ...] [--variants 1 2 3 1-perturbed ...] [--out runs/examples] [--write]

A variant is a seed, or seed 1 with a small change: `1-perturbed` has one weight of the quickstart's warm-started model changed by 1e-3,
`1-reseeded` the same model with seed 101 in everything after it, `1-threads` two threads in each model rank where the others have one.
Every variant of a commit has a folder of its own below --out, in which the commands of examples/expected.yaml are run as they stand. What
is finished there is not repeated; a commit that changes only pages and tests counts as the one before it.

All of it takes hours on two cores, so it can be done in parts: `--write` adds the results of this run to examples/figures.json, and makes
the tables from that whole file. Exit status: 1 if a command failed or a figure is out of range.
"""

import argparse
import datetime
import fnmatch
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from megarl.observe.writers import read_json_lines
from megarl.sandbox.kernel import end_with_parent

ROOT = Path(__file__).parents[1]
EXPECTED = ROOT / "examples" / "expected.yaml"
PAGE = ROOT / "examples" / "figures.md"
FIGURES = ROOT / "examples" / "figures.json"  # {example: {variant: Result}}, all that the page shows
PICTURE = ROOT / "examples" / "rlhf.png"
COUNTS = ("megarl", "tools", "examples/*.yaml", "examples/*.py", "examples/*.sh", ":(exclude)*.md")  # what a figure depends on
BEGIN, END = "<!-- figures: written by tools/run_examples.py -->", "<!-- end of the figures -->"
SEEDS = ("1", "2", "3")
VARIANTS = (*SEEDS, "1-perturbed", "1-reseeded", "1-threads")
PICTURED = "rlhf/ppo"
CURVES = (
    ("reward, in deviations of the first policy's", "reward/mean"),
    ("KL to the reference, nats a response", "actor/reference_kl"),
    ("right answers of 256, sampled", "eval/heldout/avg@1"),
)
CHANGED = "+"  # suffix of a commit's name if files differ from it
WARM = "quickstart"  # the example whose model the others start from
NUDGE = 1e-3
OTHER_SEED = 100  # added to the seed of everything after a reseeded warm start


class InputError(ValueError):
    """A fault in expected.yaml or the arguments; the message is one line."""


@dataclass(frozen=True)
class Figure:
    """One number of an example, and the range that it is expected to lie in."""

    name: str
    of: str
    low: float
    high: float
    less: str | None = None
    by: str | None = None
    last: int | None = None

    def value(self, runs: Path, seed: int) -> float:
        """Read the number from the files that the runs have left."""
        figure = self._read(runs, self.of, seed)
        if self.less is not None:
            figure -= self._read(runs, self.less, seed)
        return figure / self._read(runs, self.by, seed) if self.by is not None else figure

    def _read(self, runs: Path, place: str, seed: int) -> float:
        run, _, name = place.replace("{seed}", str(seed)).partition(": ")
        metric, _, step = name.partition(" at ")
        if step or self.last is not None:
            rows = [row for row in read_json_lines(runs / run / "metrics.jsonl") if metric in row and step in ("", f"{row['step']:g}")]
            if not rows:
                raise InputError(f"{self.name}: {runs / run} has no metric {name}")
            return fmean(row[metric] for row in rows[-(self.last or 1) :])
        evaluated = runs / run / "eval.json"
        path = evaluated if evaluated.is_file() else runs / run / "summary.json"
        figure: Any = json.loads(path.read_text())
        for part in name.split("."):
            figure = figure[part]
        return float(figure)

    def in_range(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high


@dataclass(frozen=True)
class Example:
    """Commands, and the figures that they are expected to give."""

    name: str
    title: str
    commands: Sequence[str]
    figures: Sequence[Figure]
    after: Sequence[str] = ()
    family: str = ""  # its name in the file, which contains {item} if there are several
    item: str = ""


@dataclass(frozen=True)
class Result:
    """The result of an example in one variant."""

    commit: str
    date: str
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)
    failed: str | None = None  # the command that failed, or the metric that is missing


def read_expected(path: Path) -> list[Example]:
    """Read the examples of a file, in its order. Raises InputError if it is malformed."""
    examples: list[Example] = []
    for name, entry in yaml.safe_load(path.read_text()).items():
        for item in entry.get("items", [""]):

            def filled(text: str, item: str = item) -> str:
                return text.replace("{item}", item)

            figures = [
                Figure(title, filled(spec["of"]), float(low), float(high), spec.get("less"), spec.get("by"), spec.get("last"))
                for title, spec in entry["figures"].items()
                for low, high in [spec["range"]]
            ]
            commands = [filled(command) for command in entry["commands"]]
            examples.append(Example(filled(name), filled(entry["title"]), commands, figures, entry.get("after", []), name, item))
    known = [example.name for example in examples]
    for example in examples:
        for needed in example.after:
            if needed not in known:
                raise InputError(f"{path}: {example.name}: after: there is no example {needed!r}")
            if known.index(needed) > known.index(example.name):
                raise InputError(f"{path}: {example.name}: after: {needed!r} comes later in the file")
    return examples


def chosen(examples: Sequence[Example], patterns: Sequence[str]) -> list[Example]:
    """Return the examples that the patterns name, and those that must run before them, in the order of the file."""
    by_name = {example.name: example for example in examples}
    wanted = [example.name for example in examples if any(fnmatch.fnmatch(example.name, pattern) for pattern in patterns)]
    if not wanted:
        raise InputError(f"--only: {' '.join(patterns)}: there is no such example ({', '.join(by_name)})")
    for name in wanted:  # grows during the loop
        wanted += [needed for needed in by_name[name].after if needed not in wanted]
    return [example for example in examples if example.name in wanted]


def prepare(out: Path, variant: str) -> Path:
    """Make the folder of a variant, with links to the repository's examples and tools, and runs of its own."""
    place = out / variant
    if out.name.endswith(CHANGED):
        shutil.rmtree(place, ignore_errors=True)  # made with other changes
    place.mkdir(parents=True, exist_ok=True)
    for name in ("examples", "tools"):
        link = place / name
        if not link.exists():
            link.symlink_to(ROOT / name)
    return place


def warm_start(out: Path, variant: str) -> None:
    """Copy the quickstart's models of the plain seed, with one weight changed if the variant says so."""
    from safetensors.torch import load_file, save_file

    seed, _, change = variant.partition("-")
    theirs, target = out / seed / "runs" / "quickstart-seed1", out / variant / "runs" / "quickstart-seed1"
    if not (theirs / "sft" / "model").is_dir():
        raise InputError(f"--variants: {variant} begins with the warm start of {seed}, which is not there: run {seed} first")
    if target.exists():
        return
    partial = target.with_name(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in ("tiny", "sft"):
        shutil.copytree(theirs / name, partial / name)
    if change == "perturbed":
        path = partial / "sft" / "model" / "model.safetensors"
        tensors = load_file(path)
        tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] += NUDGE
        save_file(tensors, path, metadata={"format": "pt"})
    partial.rename(target)


def seed_of(variant: str) -> int:
    """Return the seed of everything after the warm start."""
    seed, _, change = variant.partition("-")
    return int(seed) + (OTHER_SEED if change == "reseeded" else 0)


def commands(example: Example, variant: str) -> Iterator[list[str]]:
    """Yield the commands to run, with this interpreter's megarl, whatever else is installed."""
    for command in example.commands:
        if "-" in variant and example.name == WARM and "train" not in command.split():
            continue  # its models were copied
        first, *rest = shlex.split(command.replace("{seed}", str(seed_of(variant))))
        yield [sys.executable, *(["-m", "megarl.cli"] if first == "megarl" else []), *rest]


def run(example: Example, place: Path, variant: str, commit: str) -> Result:
    """Run the commands and read the figures. Output goes to a log beside the runs."""
    log = place / "logs" / f"{example.name.replace('/', '-')}.log"
    log.parent.mkdir(exist_ok=True)
    begun, date = time.monotonic(), today()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # where packages may be that are not in the locks
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2" if variant.endswith("-threads") else "1"}
    with log.open("w") as file:
        for command in commands(example, variant):
            ended = subprocess.run(
                command, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=end_with_parent
            )
            if ended.returncode:
                return Result(commit, date, time.monotonic() - begun, {}, f"{shlex.join(command[1:])} (see {log})")
    seconds = time.monotonic() - begun
    try:
        return Result(commit, date, seconds, {figure.name: figure.value(place / "runs", seed_of(variant)) for figure in example.figures})
    except (InputError, OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return Result(commit, date, seconds, {}, f"{type(error).__name__}: {error}")


def done(stored: Path) -> Result | None:
    """Return the stored result of an example; None if there is none, or it failed."""
    result = Result(**json.loads(stored.read_text())) if stored.is_file() else None
    return None if result is None or result.failed is not None else result


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def commit_now() -> str:
    """Return the last commit that changed what figures depend on, with CHANGED if files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words, "--", *COUNTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h") + (CHANGED if git("status", "--porcelain") else "")


def faults(example: Example, result: Result) -> list[str]:
    """Return what is wrong with a result: a failed command, or figures out of range."""
    if result.failed is not None:
        return [f"failed: {result.failed}"]
    return [
        f"{figure.name}: {result.figures[figure.name]:.4g} is out of range [{figure.low:g}, {figure.high:g}]"
        for figure in example.figures
        if not figure.in_range(result.figures[figure.name])
    ]


def tables(examples: Sequence[Example], published: Mapping[str, Mapping[str, Result]]) -> str:
    """Return a Markdown table for each family of examples, with a column for each variant. What is out of range is bold."""
    lines = []
    for _, group in groupby(examples, key=lambda example: example.family):
        family = [example for example in group if published.get(example.name)]
        if not family:
            continue
        variants = [variant for variant in VARIANTS if any(variant in published[example.name] for example in family)]
        results = [result for example in family for result in published[example.name].values()]
        by = sorted({f"{result.date}, commit {result.commit}" for result in results})
        title = family[0].title if len(family) == 1 else family[0].title.replace(family[0].item, "each")
        lines += [f"**`{family[0].family}`**: {title} ({'; '.join(by)})", ""]
        lines += [f"| | range | {' | '.join(variants)} |", "|---" * (2 + len(variants)) + "|"]
        for example in family:
            row = published[example.name]
            for figure in example.figures:
                name = f"`{example.item}`, {figure.name}" if example.item else figure.name
                cells = [_cell(figure, row.get(variant)) for variant in variants]
                lines.append(f"| {name} | {figure.low:g} to {figure.high:g} | {' | '.join(cells)} |")
        minutes = [
            fmean([row[variant].seconds / 60 for row in (published[example.name] for example in family) if variant in row])
            for variant in variants
        ]
        lines += [f"| minutes{' each' if len(family) > 1 else ''} | | {' | '.join(f'{value:.1f}' for value in minutes)} |", ""]
    return "\n".join(lines)


def _cell(figure: Figure, result: Result | None) -> str:
    if result is None:
        return ""
    if result.failed is not None:
        return "**failed**"
    value = result.figures.get(figure.name)
    if value is None:  # the figure was added later
        return ""
    return f"{value:.3g}" if figure.in_range(value) else f"**{value:.3g}**"


def publish(examples: Sequence[Example], results: Mapping[tuple[str, str], Result]) -> None:
    """Add the results to figures.json, and write the page's tables from all that it holds about the current examples."""
    figures = read_figures(FIGURES)
    for (name, variant), result in results.items():
        figures.setdefault(name, {})[variant] = result
    ordered = {example.name: figures[example.name] for example in examples if example.name in figures}
    plain = {name: {variant: asdict(ordered[name][variant]) for variant in VARIANTS if variant in ordered[name]} for name in ordered}
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(examples, ordered)}\n{END}{after}")
    FIGURES.write_text(json.dumps(plain, indent=1) + "\n")


def read_figures(path: Path) -> dict[str, dict[str, Result]]:
    """Read what was published; nothing if there is no file."""
    if not path.is_file():
        return {}
    return {name: {variant: Result(**result) for variant, result in row.items()} for name, row in json.loads(path.read_text()).items()}


def draw(out: Path, variants: Sequence[str], picture: Path) -> None:
    """Draw PPO-RLHF step by step, a line for each variant: its reward, its distance from the reference, and its held-out accuracy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Picture

    figure = Picture(figsize=(5 * len(CURVES), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (title, name) in zip(figure.subplots(1, len(CURVES)), CURVES, strict=True):
        for variant in variants:
            rows = read_json_lines(out / variant / "runs" / PICTURED / "metrics.jsonl")
            points = [(row["step"], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points, strict=True), label=variant, marker="o" if len(points) < 10 else None)
            targets = [row["actor/kl_target"] for row in rows if "actor/kl_target" in row]
        if name == "actor/reference_kl":
            axis.axhline(targets[-1], color="grey", linestyle=":")
        axis.set_title(title)
        axis.set_xlabel("step")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(variants))
    figure.savefig(picture, dpi=80)


def results_of(examples: Sequence[Example], variant: str, out: Path, commit: str) -> Iterator[tuple[Example, Result]]:
    """Yield each example with its result in one variant, stored or run now. Raises InputError if files change meanwhile."""
    place, failed = prepare(out, variant), set[str]()
    if "-" in variant:
        warm_start(out, variant)
    for example in examples:
        stored = place / "results" / f"{example.name.replace('/', '-')}.json"
        result = done(stored)
        if result is None:
            print(f"{variant}: {example.name} ...", flush=True)
            missing = [name for name in example.after if name in failed]
            result = Result(commit, today(), 0, {}, f"{missing[0]} has failed") if missing else run(example, place, variant, commit)
            if commit_now() != commit:
                place.rename(place.with_name(f".{variant}-{time.time_ns()}"))  # so that nobody takes it for a result of this commit
                raise InputError(f"{variant}: {example.name}: the files changed while it ran; what was run of this variant is of no commit")
            stored.parent.mkdir(exist_ok=True)
            partial = stored.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(result), indent=2) + "\n")
            partial.replace(stored)
        if result.failed is not None:
            failed.add(example.name)
        yield example, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="examples, and what they come after")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "examples")
    parser.add_argument("--write", action="store_true", help="add the figures to examples/figures.json and examples/figures.md")
    given = parser.parse_args()
    commit, faulty, error = commit_now(), 0, None
    out = given.out.resolve() / commit
    results: dict[tuple[str, str], Result] = {}
    try:
        examples = read_expected(EXPECTED)
        wanted = chosen(examples, given.only)
        for variant in given.variants:
            for example, result in results_of(wanted, variant, out, commit):
                results[example.name, variant] = result
                wrong = faults(example, result)
                faulty += bool(wrong)
                shown = "  ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
                print(f"{variant}: {example.name}: {'; '.join(wrong) or 'in range'} ({shown}; {result.seconds:.0f} s)", flush=True)
    except InputError as found:
        error = found
    if given.write and results:
        publish(examples, results)
        if all((PICTURED, seed) in results and results[PICTURED, seed].failed is None for seed in SEEDS):  # as the page says
            draw(out, SEEDS, PICTURE)
    if error is not None:
        print(f"run_examples: error: {error}", file=sys.stderr)
        return 2
    print(f"{faulty} of {len(results)} results failed or are out of range" if faulty else f"all {len(results)} results are in range")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
