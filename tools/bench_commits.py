"""Compare this checkout with an earlier commit, command by command: `python -m tools.bench_commits COMMIT [--rounds 3] [--directory DIR]`.

Both run in this environment, in turn, with the same configurations, on two cores: RL steps on a mixture of experts with a million
parameters in float32 (64 prompts with 8 responses of up to 32 tokens, and of up to 256), runs of 60 million parameters, which save and
resume, conversion of 1.4 GB in bfloat16, and the check of 100,000 prompts. The table shows medians, in brackets the least and the most.
"""

import argparse
import inspect
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.observe.writers import read_json_lines
from tools.bench_convert import make_model
from tools.bench_step import CONFIG, FILLING, LONGEST, LR, PROMPT, PROMPTS, SAMPLES, cache_mb, letters, words, write_prompts
from tools.make_tiny_model import build

ROOT = Path(__file__).parents[1]
LAYERS = 13  # of the model that is converted
ROWS = 100_000  # prompts to check
STEPS = 6
SPREAD = ("layout.ranks=2", "rollout.replicas=2")
LONG = (*SPREAD, "rollout.max_response_tokens=256", f"rollout.kv_cache_mb={cache_mb(256)}", "train.steps=4")
LARGE = ("train.prompts_per_step=8", "rollout.samples_per_prompt=2", "rollout.max_num_seqs=16")
Figures = dict[str, float]


class Side:
    """A commit: runs its commands.

    Args:
        root: its checkout.
        here: a directory for what it writes.
        models: the models by name.
    """

    def __init__(self, root: Path, here: Path, models: dict[str, Path]) -> None:
        self._here, self._models = here, models
        self._environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{here}"}
        here.mkdir()
        (here / "letters.py").write_text(inspect.getsource(letters))
        words(here, STEPS)

    def _configure(self, model: str) -> None:
        settings = {"prompts": PROMPTS, "samples": SAMPLES, "prompt": PROMPT, "longest": LONGEST, "steps": STEPS, "lr": LR}
        text = CONFIG.format(here=self._here, model=self._models[model], reward="letters:letters", cache=cache_mb(LONGEST), **settings)
        (self._here / "job.yaml").write_text(text)

    def _start(self, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "megarl.cli", *map(str, arguments)]
        with (self._here / "log").open("w") as log:
            return subprocess.Popen(command, cwd=self._here, env=self._environment, stdout=log, stderr=log)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        if process.wait():
            raise RuntimeError((self._here / "log").read_text()[-3000:])

    def command(self, *arguments: object) -> float:
        """Run a command; return its seconds."""
        begun = time.perf_counter()
        self._finish(self._start(*arguments))
        return time.perf_counter() - begun

    def train(self, model: str, *overrides: str, steps: int = 0) -> tuple[list[dict[str, Any]], float, float]:
        """Train; return the metrics of its steps, and the seconds to the end of its first step and to its own end.

        Args:
            model: the model's name.
            overrides: beside the configuration's values.
            steps: those that an earlier run has made, which this one goes on with.
        """
        self._configure(model)
        metrics, begun = self._here / "job" / "metrics.jsonl", time.perf_counter()

        def learned() -> list[dict[str, Any]]:
            return [row for row in read_json_lines(metrics) if "actor/lr" in row and row["step"] > steps]

        process, size = self._start("train", self._here / "job.yaml", *overrides), -1
        while process.poll() is None:
            if metrics.exists() and metrics.stat().st_size != size:
                size = metrics.stat().st_size
                if learned():
                    break
            time.sleep(0.05)
        first = time.perf_counter() - begun
        self._finish(process)
        return learned(), first, time.perf_counter() - begun

    def clear(self) -> None:
        """Remove what the last run has written."""
        shutil.rmtree(self._here / "job", ignore_errors=True)
        shutil.rmtree(self._here / "converted", ignore_errors=True)

    # --- what is measured

    def steps(self, *overrides: str) -> Figures:
        """A run of short responses."""
        rows, first, end = self.train("small", *overrides)
        named = "two ranks and two engines" if overrides else "one rank and one engine"
        step = statistics.fmean(row["perf/time_per_step"] for row in rows[FILLING:])
        return {f"RL step, {named}": step, f"command to the end of the first step, {named}": first, f"run of {STEPS} steps, {named}": end}

    def long_steps(self) -> Figures:
        """A run whose responses differ much in length."""
        rows, _, _ = self.train("small", *LONG)
        tokens = sum(row["response_length/mean"] for row in rows[1:]) * PROMPTS * SAMPLES
        return {"1,000 tokens of an RL step with long-tailed lengths": 1000 * sum(row["perf/time_per_step"] for row in rows[1:]) / tokens}

    def large_steps(self) -> Figures:
        """A run of a larger model; and one that saves each step, and goes on."""
        what = "60M parameters, "
        rows, _, _ = self.train("large", *LARGE, "train.steps=5")
        sync = statistics.median(row["timing_s/sync"] for row in rows[1:])
        self.clear()
        rows, _, _ = self.train("large", *LARGE, "save.every=1", "train.steps=3")
        blocked = statistics.median(row["timing_s/save"] for row in rows[1:])
        _, resumed, _ = self.train("large", *LARGE, "save.every=1", "train.steps=4", steps=3)
        return {
            what + "weight sync": sync,
            what + "blocked by a save": blocked,
            what + "command to the end of the first step after a resume": resumed,
        }

    def conversion(self) -> Figures:
        """Hugging Face to Megatron and back."""
        megatron, back = self._here / "converted" / "megatron", self._here / "converted" / "hf"
        megatron.parent.mkdir()
        duration = self.command("convert", "hf-to-megatron", self._models["huge"], megatron)
        return {"convert 1.4 GB to Megatron": duration, "and back": self.command("convert", "megatron-to-hf", megatron, back)}

    def check(self) -> Figures:
        """All checks of a run with many prompts."""
        self._configure("small")
        write_prompts(many := self._here / "many.jsonl", ROWS)
        return {f"check a run of {ROWS:,} prompts": self.command("train", "--check", self._here / "job.yaml", f"data.train.path={many}")}

    def measures(self) -> Iterable[Callable[[], Figures]]:
        """Everything that is measured, in order."""
        return (self.steps, lambda: self.steps(*SPREAD), self.long_steps, self.large_steps, self.conversion, self.check)


@contextmanager
def checkout(commit: str, path: Path) -> Iterator[Path]:
    """Check a commit out at a path, which must not exist, for the block."""
    subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(path), commit], check=True)
    try:
        yield path
    finally:
        subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(path)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_commits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="for all files; the default is a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as scratch, checkout(given.commit, Path(scratch) / "before") as before:
        models = {name: Path(scratch) / name for name in ("small", "large", "huge")}
        build(models["small"], layers=4, hidden=128, experts=8, expert_hidden=128, seed=1)
        build(models["large"], layers=4, hidden=512, experts=16, expert_hidden=576, seed=1)
        make_model(models["huge"], LAYERS)
        os.sync()
        sides = {"before": Side(before, Path(scratch) / "b", models), "now": Side(ROOT, Path(scratch) / "n", models)}
        results: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
        for turn in range(given.rounds):
            order = list(sides) if turn % 2 else list(sides)[::-1]
            for measures in zip(*(sides[name].measures() for name in order), strict=True):
                for name, measure in zip(order, measures, strict=True):
                    sides[name].clear()
                    for what, seconds in measure().items():
                        results[name].setdefault(what, []).append(seconds)
                        print(f"round {turn + 1}, {name}: {what}: {seconds:.2f} s", flush=True)
    print(f"\n| | {given.commit}, s | now, s | ratio |\n|---|---|---|---|")
    for what, times in results["before"].items():
        ratios = [ours / theirs for ours, theirs in zip(results["now"][what], times, strict=True)]
        shown = [
            f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in (times, results["now"][what], ratios)
        ]
        print(f"| {what} | {' | '.join(shown)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
