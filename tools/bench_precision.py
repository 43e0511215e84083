"""Measure what precision buys: `python -m tools.bench_precision [--seeds 1 2 3] [--steps 3] [--write]`.

For each seed, makes short GRPO runs of a tiny mixture of experts whose policy is in bfloat16: as it is, with float32 heads on both sides,
and with an engine in float32; the first two also with the engine's experts replayed (R3). The table shows the share of routing choices that
differ, the gap of the log-probs, and the KL between engine and trainer. `--write` puts it into megarl/parallel/figures.md.
"""

import argparse
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path

from megarl import load_config, train
from tools.bench_routing import CONFIG, EXPERTS, LAYERS, TOPK, commit, measured, put
from tools.make_tiny_model import build

BEGIN = "<!-- written by tools/bench_precision.py -->"
HEADS = ("model.fp32_head=true", "rollout.fp32_head=true")
CASES = {
    "bfloat16 on both sides": (),
    "float32 heads": HEADS,
    "engine in float32": ("rollout.dtype=float32",),
    "bfloat16, R3": ("routing.replay=r3",),
    "float32 heads, R3": (*HEADS, "routing.replay=r3"),
}
SHOWN = {
    "choices that differ": ("routing/rollout_changed_frac", "{:.2%}"),
    "mean gap of log-probs": ("training/logprob_gap_mean", "{:.5f}"),
    "largest": ("training/logprob_gap_max", "{:.3f}"),
    "KL of engine and trainer": ("rollout_corr/k3_kl", "{:.2e}"),
}


def table(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """Return the lines of a Markdown table, with the mean, the smallest and the largest of each number over the seeds."""
    lines = [f"| | {' | '.join(SHOWN)} |", "|---" * (1 + len(SHOWN)) + "|"]
    for case, seeds in results.items():
        cells = []
        for name, form in SHOWN.values():
            values = [one[name] for one in seeds]
            cells.append(f"{form.format(statistics.fmean(values))} ({form.format(min(values))} to {form.format(max(values))})")
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into megarl/parallel/figures.md")
    given = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        for seed in given.seeds:
            model = here / f"model-{seed}"
            build(model, layers=LAYERS, hidden=128, experts=EXPERTS, expert_hidden=64, seed=seed, num_experts_per_tok=TOPK)
            for number, (case, overrides) in enumerate(CASES.items()):
                name = f"{number}-{seed}"
                text = CONFIG.format(name=name, runs=here, seed=seed, model=model, replay="off", steps=given.steps)
                (here / f"{name}.yaml").write_text(text)
                train(load_config(here / f"{name}.yaml", "model.dtype=bfloat16", *overrides))
                results.setdefault(case, []).append(measured(here / name, [metric for metric, _ in SHOWN.values()]))
    seeds = f"{len(given.seeds)} seeds: their mean, the smallest and the largest"
    lines = [
        *table(results),
        "",
        f"{date.today()}, commit {commit()}, two cores, {LAYERS} layers of {EXPERTS} experts, {given.steps} steps a run, {seeds}. The "
        "policy is in bfloat16, its routers score in float32.",
    ]
    print("\n".join(lines))
    if given.write:
        put(BEGIN, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
