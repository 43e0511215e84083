"""Measure what is saved if engines do not wait: `python -m tools.bench_modes [--rounds 2] [--steps 20] [--write]`.

Runs the same RL job in each `rollout.mode`, on episodes of three turns that a server answers after a seeded, log-normal delay, two seconds
per episode on average; and again without any delay, where overlap is the only gain. Every run has the same number of episodes, tokens and
updates per step, and the runs alternate. The table shows medians of the rounds: seconds per step (without the first two, in which the
pipeline fills), the speed-up over `sync`, the most that it could be, and CPU seconds per step of engines and ranks. The most is that of a
pipeline without overhead, with the times that rollout and update take in `sync`: with a lag of 1 it is below 2, since one batch's slowest
episode waits for another's. `sync, all cores` has two ranks and two engines, as a sequential run should on two cores. `--write` puts the
table into examples/async/figures.md. Exit status: 1 if a bound is missed.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from megarl.environments.server import EnvironmentServer
from megarl.observe.writers import read_json_lines
from megarl.sandbox.kernel import end_with_parent
from tools.bench_routing import ROOT, commit, put
from tools.make_tiny_model import build

PAGE = ROOT / "examples" / "async" / "figures.md"
BEGIN = "<!-- written by tools/bench_modes.py -->"
TURNS, MEDIAN_S, SPREAD = 3, 0.4, 1.0  # turns of an episode; median and sigma of a turn's log-normal delay, whose mean is 1.65 medians
FILLING = 2  # steps that are not measured
POLL_S = 0.2
ENGINES, RANKS = "ray::RolloutWorker", "ray::ModelWorker"  # prefixes of the titles of their processes
MODES = {
    "sync": (),
    "sync, all cores": ("layout.ranks=2", "rollout.replicas=2"),
    "ahead": ("rollout.mode=ahead",),
    **{f"free, max_lag {lag}": ("rollout.mode=free", f"rollout.max_lag={lag}") for lag in (1, 2, 4)},
}
LAGS = {"ahead": 0, **{f"free, max_lag {lag}": lag for lag in (1, 2, 4)}}  # batches that are begun in addition to the next one
BOUNDS = {"ahead": 1.2, "free, max_lag 1": 1.8}  # least speed-up over sync, with tools
CONFIG = """
name: job
seed: 1
run_dir: {runs}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false}}
optimizer: {{lr: 1.0e-5, warmup_steps: 1}}
algorithm: {{type: grpo, correction: {{type: tis}}}}
data:
  train: {{type: episodes, seed: 7, items: 100000}}
  eval: {{type: episodes, seed: 1000000000, items: 2}}
environment: {{source: {{type: http, url: "{url}"}}, max_turns: 3, max_turn_tokens: 12, step_s: 60}}
reward: {{source: {{type: environment}}}}
rollout: {{samples_per_prompt: 2, max_prompt_tokens: 32, max_response_tokens: 96, max_num_seqs: 64, kv_cache_mb: 32}}
sync: {{transport: shm}}
log: {{tensorboard: false}}
train: {{steps: {steps}, prompts_per_step: 16, mini_batches: 4, epochs: 2, micro_batch_tokens: 2048, eval_at_start: false, eval_every: 0}}
"""


class Errand:
    """An environment that answers each turn after a delay, and rewards the share of letters in it."""

    def __init__(self, median_s: float) -> None:
        self._median_s = median_s

    def reset(self, seed: int) -> str:
        self._random, self._turn = random.Random(seed), 0
        return f"errand {seed % 1000}"

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool]:
        await asyncio.sleep(self._median_s * self._random.lognormvariate(0, SPREAD))
        self._turn += 1
        return "and then?", sum(map(str.isalpha, text)) / max(1, len(text)), self._turn == TURNS

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class Cost(NamedTuple):
    """What a step costs, in seconds."""

    wall: float
    engines: float  # CPU
    ranks: float  # CPU
    lag: float  # the largest lag of a token, in updates
    phases: Sequence[tuple[float, float]]  # for every step: of the rollout, and of what comes after it


class _Cpu:
    """The CPU seconds of the engines' and the ranks' processes, including those that have ended."""

    def __init__(self, driver: int) -> None:
        self._driver, self._held = psutil.Process(driver), dict[str, dict[int, float]]({ENGINES: {}, RANKS: {}})

    def look(self) -> tuple[float, float]:
        """Return the CPU seconds of engines and of ranks so far."""
        for process in self._driver.children(recursive=True):
            try:
                title, times = " ".join(process.cmdline()), process.cpu_times()
            except psutil.Error:
                continue
            for kind, times_of in self._held.items():
                if title.startswith(kind):
                    times_of[process.pid] = times.user + times.system
        return sum(self._held[ENGINES].values()), sum(self._held[RANKS].values())


def run(here: Path, model: Path, url: str, steps: int, overrides: Sequence[str]) -> Cost:
    """Run a job and return what a step costs. Raises RuntimeError if it fails or has lost an episode."""
    here.mkdir()
    (here / "job.yaml").write_text(CONFIG.format(runs=here / "runs", model=model, url=url, steps=steps))
    metrics = here / "runs" / "job" / "metrics.jsonl"
    with (here / "log").open("w") as log:
        command = [sys.executable, "-m", "megarl.cli", "train", str(here / "job.yaml"), *overrides]
        job = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, preexec_fn=end_with_parent)
        cpu, begun, ended, measured = _Cpu(job.pid), (0.0, 0.0), (0.0, 0.0), 0
        while job.poll() is None:
            done = len(updates(metrics))
            if done <= FILLING:
                begun = cpu.look()
            elif done < steps:
                ended, measured = cpu.look(), done - FILLING
            time.sleep(POLL_S)
    rows = updates(metrics)
    lost = sum(row["environment/failed"] for row in rows)
    if job.returncode or len(rows) != steps or lost:
        tail = (here / "log").read_text()[-3000:]
        raise RuntimeError(f"{command}: exit status {job.returncode}, {len(rows)} steps, {lost:g} episodes lost; see\n{tail}")
    if not measured:
        raise RuntimeError(f"{command}: its {steps} steps were over before one could be measured; --steps must be larger")
    engines, ranks = ((late - early) / measured for early, late in zip(begun, ended, strict=True))
    walls = [row["perf/time_per_step"] for row in rows]
    rollouts = [row.get("timing_s/rollout", 0.0) for row in rows]  # a pipeline may have had nothing to wait for
    phases = [(rollout, wall - rollout) for rollout, wall in zip(rollouts, walls, strict=True)]
    return Cost(statistics.fmean(walls[FILLING:]), engines, ranks, max(row.get("rollout/lag_max", 0.0) for row in rows), phases)


def most(phases: Sequence[tuple[float, float]], lag: int) -> float:
    """Return the speed-up over sequential steps of a pipeline without overhead.

    Args:
        phases: seconds of sequential steps: of the rollout, and of what comes after it.
        lag: a rollout begins once the update of this many steps before the last is done; 0: once that of the last step has begun.
    """
    begun, done = list[float](), list[float]()  # of what comes after the rollouts
    for step, (rollout, rest) in enumerate(phases):
        start = 0.0 if step <= lag else (done[step - 1 - lag] if lag else begun[step - 1])
        begun.append(max(start + rollout, done[-1] if done else 0.0))
        done.append(begun[-1] + rest)
    return sum(rollout + rest for rollout, rest in phases[FILLING:]) / (done[-1] - done[FILLING - 1])


def median(costs: Sequence[Cost]) -> Cost:
    """Return the median of each number, with the phases of the first run."""
    wall, engines, ranks, lag = (statistics.median(each) for each in zip(*(cost[:4] for cost in costs), strict=True))
    return Cost(wall, engines, ranks, lag, costs[0].phases)


def updates(metrics: Path) -> list[dict[str, float]]:
    """Return the rows of the finished steps."""
    return [row for row in read_json_lines(metrics) if "actor/lr" in row] if metrics.is_file() else []


def table(costs: dict[str, dict[str, Cost]]) -> list[str]:
    """Return the lines of a Markdown table."""
    columns = ("s a step", "times as fast as sync", "at most", "CPU s, engines and ranks")
    lines = [" | ".join(["| | largest lag", *(f"{waits}: {columns[0]} | {' | '.join(columns[1:])}" for waits in costs)]) + " |"]
    lines.append("|---" * (2 + len(columns) * len(costs)) + "|")
    for mode in MODES:
        cells = [f"{max(costs_of[mode].lag for costs_of in costs.values()):g}"]
        for costs_of in costs.values():
            cost, sync = costs_of[mode], costs_of["sync"]
            bound = f"{most(sync.phases, LAGS[mode]):.2f}" if mode in LAGS else ""
            cells += [f"{cost.wall:.2f}", f"{sync.wall / cost.wall:.2f}", bound, f"{cost.engines:.2f} and {cost.ranks:.2f}"]
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="put the table into examples/async/figures.md")
    given = parser.parse_args()
    waits = {"with tools": MEDIAN_S, "without waiting": 0.0}
    costs: dict[tuple[str, str], list[Cost]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        here, urls = Path(scratch), {}
        build(here / "tiny", layers=4, hidden=128, experts=8, expert_hidden=128, seed=1)
        for name, median_s in waits.items():
            server = EnvironmentServer(("127.0.0.1", 0), partial(Errand, median_s))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            urls[name] = f"http://127.0.0.1:{server.server_address[1]}"
        for number in range(given.rounds):
            for wait, url in urls.items():
                for mode, overrides in MODES.items():
                    cost = run(here / f"{number}-{wait}-{mode}", here / "tiny", url, given.steps, overrides)
                    costs.setdefault((wait, mode), []).append(cost)
                    print(f"round {number + 1}, {wait}, {mode}: {cost.wall:.2f} s a step", flush=True)
    medians = {wait: {mode: median(costs[wait, mode]) for mode in MODES} for wait in waits}
    lines = table(medians)
    print("", *lines, sep="\n")
    if given.write:
        put(BEGIN, [f"{date.today()}, commit {commit()}, two cores, medians of {given.rounds} runs in turn:", "", *lines], PAGE)
    tools = medians["with tools"]
    missed = {mode: bound for mode, bound in BOUNDS.items() if tools["sync"].wall < bound * tools[mode].wall}
    for mode, bound in missed.items():
        print(f"MISSED: {mode} is {tools['sync'].wall / tools[mode].wall:.2f} times as fast as sync with tools, of {bound:g} wanted")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
