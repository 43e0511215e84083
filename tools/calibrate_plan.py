"""Compare `megarl plan` with what others publish: `python -m tools.calibrate_plan [--write]`.

The layouts of `tools/published_layouts.yaml` are planned on their clusters, with their batches and lengths, and set beside the fastest that
the plan finds there itself. Published speeds are set beside those that the plan computes. `--write` puts both tables into
`megarl/plan/figures.md`. No GPU is needed, and no weights.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megarl.cli.init import put
from megarl.config import TrainConfig, load
from megarl.plan.devices import DEVICES, MEAN_LENGTH, Device, device_of
from megarl.plan.remedies import offloaded, parked
from megarl.plan.search import FittingLayout, search
from megarl.plan.times import StepTimes
from megarl.plan.whole import Models, Plan, build, models_of
from tests.published_models import MODELS, config_of

ROOT = Path(__file__).parent.parent
LAYOUTS, PAGE = Path(__file__).with_name("published_layouts.yaml"), ROOT / "megarl" / "plan" / "figures.md"
BASE = ROOT / "examples" / "qwen3_30b_a3b" / "gspo.yaml"
WITHIN = 1.15  # of the plan's best: a published layout that takes longer is one on which plan and publisher disagree


class Speed(NamedTuple):
    """A speed that NVIDIA publishes for NeMo-RL on H100 (docs/about/performance-summary.md), with a row of the layouts."""

    source: str  # the end of the row's source
    length: int  # mean tokens of a response with its prompt
    tokens: float  # per second and GPU
    release: str


SPEEDS = (
    Speed("grpo-qwen3-30ba3b-4n8g.yaml", 3283, 1102, "0.5"),
    Speed("grpo-qwen3-30ba3b-4n8g-async-1off.yaml", 3158, 1414, "0.5"),
    Speed("grpo-qwen3-235b-16n8g.yaml", 5671, 58.9, "0.5"),
    Speed("grpo-qwen3-235b-32n8g-async-1off.yaml", 5691, 58.7, "0.5"),
    Speed("grpo-deepseek-v3-32n8g.yaml", 745, 12.1, "0.5"),
    Speed("grpo-deepseek-v3-64n8g-async-1off.yaml", 744, 7.24, "0.5"),
)


def main() -> None:
    """Print the tables."""
    top = argparse.ArgumentParser(prog="python -m tools.calibrate_plan", description=__doc__)
    top.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(ROOT)}")
    given = top.parse_args()
    rows = yaml.safe_load(LAYOUTS.read_text())
    with tempfile.TemporaryDirectory() as directory:
        tables = layouts_table(rows, Path(directory)) + "\n\n" + speeds_table(rows, Path(directory))
    print(tables)
    if given.write:
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(f"{before}{START}\n{tables}\n{END}{rest.partition(END)[2]}")


START, END = "<!-- made by tools.calibrate_plan -->", "<!-- end of what tools.calibrate_plan made -->"


def layouts_table(rows: list[dict[str, Any]], directory: Path) -> str:
    """Return the table of layouts: the second ratio is to the fastest layout with the engines that were published."""
    lines = [
        "| model, GPUs | published | s | the plan's fastest | s | ratio | with these engines | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ratios = list[tuple[float, float]]()
    for row in rows:
        config, models, device = planned(row, directory)
        plan, how = fitting(config, models, device, row)
        assert plan.times is not None
        gpus = row["gpus"] + row.get("engines", 0)
        layouts = search(config, models, device, memory(row), gpus, most=50)
        cells = [f"{row['model']}, {gpus}", f"{_shape(config.layout.model_dump())}; engines {_shape(config.rollout.model_dump())}{how}"]
        cells += [f"{plan.times.step:.0f}"] if not plan.faults else [f"**does not fit**: {plan.faults[0]}"]
        if layouts:
            quickest = min(layouts, key=lambda one: one.seconds)
            engines = {"tp": quickest.engine_tp, "dp": quickest.engine_dp}
            cells += [f"{_shape(quickest.layout.model_dump())}; engines {_shape(engines)}", f"{quickest.seconds:.0f}"]
        else:
            cells += ["nothing fits", ""]
        if layouts and not plan.faults:
            alike = [other.step for one in layouts if (other := _with_engines_of(config, one, models, device, row)) is not None]
            ratios.append((plan.times.step / quickest.seconds, plan.times.step / min([plan.times.step, *alike])))
            cells += [f"{ratio:.2f}" for ratio in ratios[-1]]
        else:
            cells += ["", ""]
        lines.append(f"| {' | '.join((*cells, row['source']))} |")
    close = [sum(ratio[which] <= WITHIN for ratio in ratios) for which in (0, 1)]
    fit = f"{len(ratios)} of {len(rows)} fit. Of these, {close[0]} take at most {WITHIN} times as long as the plan's fastest"
    return "\n".join(lines) + f"\n\n{fit}, and {close[1]} as the fastest with the same engines."


def _with_engines_of(config: TrainConfig, found: FittingLayout, models: Models, device: Device, row: Mapping[str, Any]) -> StepTimes | None:
    """The times of a layout that was found, with the engines of the configuration, if that fits."""
    changed = load_changes(config, [change for change in found.changes if not change.startswith("rollout.")])
    if changed.layout.ranks != config.layout.ranks:
        return None
    plan = build(changed, models, device, memory(row), remedies=False)
    return None if plan.faults else plan.times


def load_changes(config: TrainConfig, changes: list[str]) -> TrainConfig:
    """The configuration with some overrides."""
    tree = config.model_dump(mode="json")
    for change in changes:
        put(tree, *change.split("=", 1))
    return TrainConfig.model_validate(tree)


def speeds_table(rows: list[dict[str, Any]], directory: Path) -> str:
    """Return the table of speeds."""
    lines = ["| row | mean length | published tokens/s/GPU | planned | planned / published |", "|---|---|---|---|---|"]
    for speed in SPEEDS:
        row = next(row for row in rows if row["source"].endswith(speed.source))
        longest = round(speed.length / MEAN_LENGTH)  # with which the plan assumes this mean
        prompt = round(longest * row["tokens"][0] / sum(row["tokens"]))
        config, models, device = planned({**row, "tokens": [prompt, longest - prompt], "micro": max(longest, row["micro"])}, directory)
        plan = build(config, models, device, memory(row), remedies=False)
        assert plan.times is not None
        prompts, samples, _ = row["batch"]
        rate = prompts * samples * speed.length / plan.times.step / plan.gpus
        what = f"{row['model']}, {plan.gpus} GPUs ({speed.source}, {speed.release})"
        lines.append(f"| {what} | {speed.length} | {speed.tokens:g} | {rate:.0f} | {rate / speed.tokens:.2f} |")
    return "\n".join(lines)


def memory(row: Mapping[str, Any]) -> float:
    """GB of a GPU."""
    return float(row.get("gb", 80))


def planned(row: Mapping[str, Any], directory: Path) -> tuple[TrainConfig, Models, Device]:
    """Return the configuration of a row, its models and its GPU."""
    path = directory / row["model"]
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_of(MODELS[row["model"]])))
    tp, dp = row["engine"]
    shared = "engines" not in row
    prompts, samples, mini_batches = row["batch"]
    megatron = {f"num_layers_in_{end}_pipeline_stage": row[end] for end in ("first", "last") if end in row}
    sizes = {size: row[size] for size in ("tp", "pp", "cp", "ep") if size in row}
    given: dict[str, Any] = {
        "model": {
            "path": str(path),
            "dtype": "bfloat16",
            "recompute": row.get("recompute", "none"),
            "megatron": megatron,
            "mtp": "drop",
        },
        "layout": {"ranks": row["gpus"], "etp": 1, **sizes},
        "rollout.replicas": (row["gpus"] if shared else row["engines"]) // (tp * dp),
        "rollout.tp": tp,
        "rollout.dp": dp,
        "rollout.expert_parallel": dp > 1,
        "rollout.gpu_memory_fraction": row["share"],
        "rollout.quantization": "fp8" if row.get("fp8") else None,
        "rollout.max_prompt_tokens": row["tokens"][0],
        "rollout.max_response_tokens": row["tokens"][1],
        "rollout.samples_per_prompt": samples,
        "rollout.mode": "ahead" if row.get("ahead") else "sync",
        **({"algorithm.correction": {"type": "tis"}} if row.get("ahead") else {}),
        "train.prompts_per_step": prompts,
        "train.mini_batches": mini_batches,
        "train.micro_batch_tokens": max(row["micro"], sum(row["tokens"])),
        "placement.engines": "shared" if shared else "apart",
        "sync.transport": "cuda_ipc" if shared else "nccl",
    }
    config = load(BASE, [f"{key}={json.dumps(value)}" for key, value in given.items()], TrainConfig)
    return config, models_of(config), DEVICES["H100"] if memory(row) == 80 else device_of(memory(row))


def fitting(config: TrainConfig, models: Models, device: Device, row: Mapping[str, Any]) -> tuple[Plan, str]:
    """Plan a published configuration; if its file keeps the optimizer in host memory, or it does not fit otherwise, also with that."""
    tries = {"": config, ", models take turns": parked(config), ", Adam in host memory": offloaded(parked(config))}
    if row.get("offload"):
        tries.pop(", models take turns")
    for how, tried in tries.items():
        plan = build(tried, models, device, memory(row), remedies=False)
        if not plan.faults:
            return plan, how
    return plan, how


def _shape(sizes: Mapping[str, Any]) -> str:
    return " ".join(f"{size}{sizes[size]}" for size in ("tp", "pp", "cp", "ep", "dp") if sizes.get(size, 1) > 1) or "none"


if __name__ == "__main__":
    main()
