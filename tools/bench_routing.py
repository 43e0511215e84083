"""What replaying experts buys and costs: `python tools/bench_routing.py [--seeds 1 2 3] [--steps 8] [--write]`.

For each seed three short GRPO runs of a tiny mixture of experts, one after the other: routing.replay off, r2, r3. The engines sample in
bfloat16, and the routers' weights get noise on their way to them: a jitter that makes them choose other experts than the trainer, which
trains in float32. Shown: the share of choices that differ, the KL and the gap of the log-probs between engine and trainer, the alarms, the
seconds of a step without rollout and start, and the memory of a model rank. `--write` puts the table into megarl/parallel/README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import ray
import torch

from megarl import load_config, train
from megarl.workers.engines import Engines
from megarl.workers.model_groups import ModelGroups
from tools.make_tiny_model import build

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "megarl" / "parallel" / "README.md"
BEGIN, END = "<!-- written by tools/bench_routing.py -->", "<!-- end of the table -->"
REPLAYS = ("off", "r2", "r3")
JITTER = 0.02  # standard deviation of the noise; the weights' own is 0.06
LAYERS, EXPERTS, TOPK = 4, 16, 4
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
    """In the place of `ModelGroups.sync`: brings the engines other routers than the trainer has."""

    def install(worker: Any) -> None:
        policy = getattr(worker, "part", worker)._models["policy"]  # part: in the tests a rank plays one run after the other
        plain = type(policy).stream

        def stream(dtype: Any) -> Any:
            generator = torch.Generator().manual_seed(version)
            for name, tensor in plain(policy, dtype):
                router = isinstance(name, str) and name.endswith("mlp.gate.weight")  # several names: a stack of experts
                noise = JITTER * torch.randn(tensor.shape, generator=generator) if router else 0.0
                yield name, (tensor + noise).to(tensor.dtype)

        policy.stream = stream

    ray.get([actor.__ray_call__.remote(install) for actor in self.policy.group.actors])
    return SYNC(self, engines, version)


def measured(directory: Path) -> dict[str, Any]:
    """What a run's metrics say: means over its steps, medians of its times."""
    rows = [row for row in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()) if "routing/rollout_changed_frac" in row]
    summary = json.loads((directory / "summary.json").read_text())

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    return {
        "choices": mean("routing/rollout_changed_frac"),
        "tokens": mean("routing/rollout_changed_tokens"),
        "kl": mean("rollout_corr/k3_kl"),
        "gap": mean("training/logprob_gap_mean"),
        "seconds": statistics.median(row["timing_s/old_logp"] + row["timing_s/update"] for row in rows[1:]),
        "memory": summary["peak_rss_mb"]["model_worker"],
        "alarms": ", ".join(sorted(summary["alarms"])) or "none",
    }


def table(results: dict[tuple[int, str], dict[str, Any]]) -> list[str]:
    """In Markdown."""
    names = ["seed", "replay", "choices that differ", "tokens with one", "KL of engine and trainer", "mean gap of log-probs"]
    names += ["old log-probs and update, s", "memory of a rank, MB", "alarms"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for (seed, replay), found in results.items():
        cells = [seed, replay, f"{found['choices']:.1%}", f"{found['tokens']:.0%}", f"{found['kl']:.2e}", f"{found['gap']:.4f}"]
        cells += [f"{found['seconds']:.3f}", f"{found['memory']:.0f}", found["alarms"].replace("_", " ")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="put the table into megarl/parallel/README.md")
    given = parser.parse_args()
    ModelGroups.sync = jittered_sync  # type: ignore[method-assign]
    results: dict[tuple[int, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        build(here / "model", layers=LAYERS, hidden=128, experts=EXPERTS, expert_hidden=64, seed=1, num_experts_per_tok=TOPK)
        for seed in given.seeds:
            for replay in REPLAYS:
                name = f"{replay}-{seed}"
                text = CONFIG.format(name=name, runs=here, seed=seed, model=here / "model", replay=replay, steps=given.steps)
                (here / f"{name}.yaml").write_text(text)
                train(load_config(here / f"{name}.yaml"))
                results[seed, replay] = measured(here / name)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    seconds = {replay: statistics.median(results[seed, replay]["seconds"] for seed in given.seeds) for replay in REPLAYS}
    ratios = ", ".join(f"{replay} {seconds[replay] / seconds['off']:.2f}" for replay in REPLAYS[1:])
    lines = [
        *table(results),
        "",
        f"{date.today()}, commit {commit}, two cores, {given.steps} steps a run. Seconds of old log-probs and update against off, medians "
        f"of the seeds: {ratios}. Each token carries {LAYERS * TOPK} bytes from the engine ({LAYERS} layers of {TOPK} experts), each rank "
        "fetches those of its own layers.",
    ]
    print("\n".join(lines))
    if given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text("\n".join([before + BEGIN, *lines, END]) + after)
    halved = all(results[seed, "r3"]["kl"] < 0.5 * results[seed, "off"]["kl"] for seed in given.seeds)
    return 0 if halved else 1


if __name__ == "__main__":
    sys.exit(main())
