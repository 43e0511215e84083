"""Measure what replaying experts buys and costs: `python -m tools.bench_routing [--seeds 1 2 3] [--steps 8] [--rounds 40] [--write]`.

For each seed, makes three short GRPO runs of a tiny mixture of experts, with routing.replay off, r2 and r3. The engines sample in bfloat16,
and the routers' weights get noise on their way to the engines: a jitter that makes these choose different experts from the trainer, which
trains in float32. The table shows the share of choices that differ, the KL and the gap of the log-probs between engine and trainer, the
memory of a model rank, and the alarms.

The cost is measured separately, on one rank and one batch: CPU seconds of old log-probs and update, in rounds that alternate between off,
r2 and r3. The replayed experts are those that the routers choose anyway, so the models' own work is the same. `--write` puts the cost into
megarl/parallel/figures.md. Exit status: 1 if R3 does not halve the KL, or a replay costs more than 3 %.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch

from megarl import load_config, train
from megarl.config import OptimizerSettings, TrainConfig
from megarl.driver.engines import Engines
from megarl.driver.model_groups import ModelGroups
from megarl.ranks import assemble
from megarl.ranks.model_worker import RECORD
from megarl.ranks.step_plan import Group
from tools.lone_policy import lone_policy, responses
from tools.make_tiny_model import build

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "megarl" / "parallel" / "figures.md"
BEGIN, END = "<!-- written by tools/bench_routing.py -->", "<!-- end of the table -->"
REPLAYS = ("off", "r2", "r3")
JITTER = 0.02  # standard deviation of the noise; that of the weights is 0.06
LAYERS, EXPERTS, TOPK = 4, 16, 4
SHOWN = {
    "routing/rollout_changed_frac": "{:.1%}",
    "routing/rollout_changed_tokens": "{:.0%}",
    "rollout_corr/k3_kl": "{:.2e}",
    "training/logprob_gap_mean": "{:.4f}",
}
COST = 1.03  # the most that a step with a replay may cost, relative to one without
CONFIG = """
name: {name}
run_dir: {runs}
seed: {seed}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false}}
optimizer: {{lr: 1.0e-4}}
algorithm: {{type: grpo}}
routing: {{replay: {replay}, sample: 1.0, alarm: 0.02}}
data:
  train: {{type: reasoning_gym, dataset: spell_backward, params: {{min_word_len: 3, max_word_len: 5}}, seed: {seed}, items: 512}}
  eval: {{type: reasoning_gym, dataset: spell_backward, params: {{min_word_len: 3, max_word_len: 5}}, seed: 1000000000, items: 8}}
reward: {{source: {{type: reasoning_gym}}, require_finished: false}}
rollout: {{samples_per_prompt: 8, max_prompt_tokens: 32, max_response_tokens: 32, max_num_seqs: 256, kv_cache_mb: 64, dtype: bfloat16}}
sync: {{transport: shm, logprob_gap: 1.0}}
log: {{tensorboard: false}}
train: {{steps: {steps}, prompts_per_step: 32, micro_batch_tokens: 4096, eval_at_start: false, old_logp: forward}}
"""


SYNC = ModelGroups.sync


def jittered_sync(self: ModelGroups, engines: Engines, version: int) -> Any:
    """Replace `ModelGroups.sync`: send the engines routers that differ from the trainer's."""

    def install(worker: Any) -> None:
        policy = getattr(worker, "part", worker)._models["policy"]  # part: in the tests, one rank serves several runs one after the other
        plain = type(policy).stream

        def stream(dtype: Any, **places: bool) -> Any:
            generator = torch.Generator().manual_seed(version)
            for name, tensor in plain(policy, dtype, **places):
                router = isinstance(name, str) and name.endswith("mlp.gate.weight")  # otherwise several names, of a stack of experts
                noise = JITTER * torch.randn(tensor.shape, generator=generator) if router else 0.0
                yield name, (tensor + noise).to(tensor.dtype)

        policy.stream = stream

    ray.get([actor.__ray_call__.remote(install) for actor in self.policy.actors])
    return SYNC(self, engines, version)


FORWARD = ModelGroups.forward


def touched(config: TrainConfig) -> tuple[list[int], int]:
    """Return the bytes of routed experts that each rank fetches in the first step of a run, and the bytes of those of all responses."""
    counts: list[tuple[list[int], int]] = []

    def count(worker: Any) -> None:
        plain = assemble.ray

        def get(references: Any) -> Any:
            values = plain.get(references)
            worker.touched += sum(value.nbytes for value in values if isinstance(value, np.ndarray))
            return values

        worker.touched, assemble.ray = 0, SimpleNamespace(get=get, put=plain.put)

    def forward(self: ModelGroups, groups: Sequence[Group], **options: Any) -> Any:
        actors = self.policy.actors
        ray.get([actor.__ray_call__.remote(count) for actor in actors])
        done = FORWARD(self, groups, **options)
        ranks = ray.get([actor.__ray_call__.remote(lambda worker: worker.touched) for actor in actors])
        tokens = sum(response.prompt_length + response.length - 1 for group in groups for response in group.responses)
        counts.append((ranks, tokens * LAYERS * TOPK))
        return done

    ModelGroups.forward = forward  # type: ignore[method-assign]
    try:
        train(config)
    finally:
        ModelGroups.forward = FORWARD  # type: ignore[method-assign]
    return counts[0]


def measured(directory: Path, names: Iterable[str]) -> dict[str, float]:
    """Return a run's metrics, as means over its steps."""
    rows = [row for row in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()) if "routing/rollout_changed_frac" in row]
    return {name: statistics.fmean(row[name] for row in rows) for name in names}


def told(directory: Path) -> dict[str, Any]:
    """Return the memory and the alarms in a run's summary."""
    summary = json.loads((directory / "summary.json").read_text())
    return {"memory": summary["peak_rss_mb"]["model_worker"], "alarms": ", ".join(sorted(summary["alarms"])) or "none"}


def commit() -> str:
    """Return the commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def put(begin: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Put lines into a page, replacing those between `begin` and END."""
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + begin, *lines, END]) + after)


def table(results: dict[tuple[int, str], dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    names = ["seed", "replay", "choices that differ", "tokens with one", "KL of engine and trainer", "mean gap of log-probs"]
    names += ["memory of a rank, MB", "alarms"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for (seed, replay), result in results.items():
        cells = [seed, replay, *(form.format(result[name]) for name, form in SHOWN.items())]
        cells += [f"{result['memory']:.0f}", result["alarms"].replace("_", " ")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def costs(path: Path, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of old log-probs and update, by kind of replay and round."""
    torch.set_num_threads(1)
    policy, logp, loss = lone_policy(path, OptimizerSettings(lr=1e-12))
    vocabulary = policy.description.vocab
    plain = [responses(64, 64, vocabulary), responses(64, 64, vocabulary)]  # micro-batches of 4,096 tokens

    with policy.routing.follow("routed_experts", replay=False, record="all") as routing:
        policy.forward_tokens(plain, "old_logp", logp, routing)
        known = [batch.with_extra(routed_experts=routing.recorded[index]) for index, batch in enumerate(plain)]

    def step(replay: str) -> float:
        begun = time.process_time()
        batches = known if replay == "r3" else plain
        follow = policy.routing.follow("routed_experts", replay=replay == "r3", record=RECORD[replay]) if replay != "off" else nullcontext()
        with follow as routing:
            filled = policy.forward_tokens(batches, "old_logp", logp, routing)
            if routing is not None:
                routing.metrics("rollout")
        if replay == "r2":
            assert routing is not None
            filled = [batch.with_extra(routed_experts=routing.recorded[index]) for index, batch in enumerate(filled)]
        with policy.routing.follow("routed_experts", replay=True) if replay != "off" else nullcontext() as routing:
            policy.step(filled, loss, routing)
            if routing is not None:
                routing.metrics("policy")
        return time.process_time() - begun

    for replay in REPLAYS:
        step(replay)  # warm-up: the first steps allocate
    times = [{replay: step(replay) for replay in (REPLAYS if turn % 2 else REPLAYS[::-1])} for turn in range(rounds)]
    return {replay: [time[replay] for time in times] for replay in REPLAYS}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40, help="of the cost")
    parser.add_argument("--write", action="store_true", help="put the cost into megarl/parallel/figures.md")
    given = parser.parse_args()
    ModelGroups.sync = jittered_sync  # type: ignore[method-assign]
    results: dict[tuple[int, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        build(here / "model", layers=LAYERS, hidden=128, experts=EXPERTS, expert_hidden=64, seed=1, num_experts_per_tok=TOPK)
        cpu = costs(here / "model", given.rounds)
        for seed in given.seeds:
            for replay in REPLAYS:
                name = f"{replay}-{seed}"
                text = CONFIG.format(name=name, runs=here, seed=seed, model=here / "model", replay=replay, steps=given.steps)
                (here / f"{name}.yaml").write_text(text)
                train(load_config(here / f"{name}.yaml"))
                results[seed, replay] = measured(here / name, SHOWN) | told(here / name)
        ranks, whole = touched(load_config(here / f"{name}.yaml", "name=touched", "train.steps=1", "layout={ranks: 4, pp: 2}"))
    ratio = {replay: statistics.median(one / off for one, off in zip(cpu[replay], cpu["off"], strict=True)) for replay in REPLAYS[1:]}
    ratios = ", ".join(f"{replay} {value:.3f}" for replay, value in ratio.items())
    cost = (
        f"{date.today()}, commit {commit()}, two cores. Old log-probs and update on one rank and one batch, CPU seconds over those of off "
        f"({statistics.median(cpu['off']):.2f}), medians of {given.rounds} rounds in turn: {ratios} (at most {COST}). Each token carries "
        f"{LAYERS * TOPK} bytes from the engine ({LAYERS} layers of {TOPK} experts). With two stages of two data-parallel ranks a rank "
        f"fetches {min(ranks) / whole:.1%} to {max(ranks) / whole:.1%} of a step's {whole / 1e6:.2f} MB."
    )
    print("\n".join([*table(results), "", cost]))
    if given.write:
        put(BEGIN, [cost])
    halved = all(results[seed, "r3"]["rollout_corr/k3_kl"] < 0.5 * results[seed, "off"]["rollout_corr/k3_kl"] for seed in given.seeds)
    return 0 if halved and max(ratio.values()) <= COST else 1


if __name__ == "__main__":
    sys.exit(main())
