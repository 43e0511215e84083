"""Compare `megarl plan` with what others publish: `python -m tools.calibrate_plan [--write]`.

The layouts of `tools/published_layouts.yaml` are planned on their clusters, with their batches and lengths, and set beside the fastest that
the plan finds there itself. The speeds of `tools/published_speeds.yaml`, of steps, of training and of decoding, are set beside those that
the plan computes. `--write` puts the tables into `megarl/plan/figures.md`. No GPU is needed, and no weights.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megarl.cli.init import put
from megarl.config import Layout, RolloutSettings, TrainConfig, load
from megarl.plan.devices import DEVICES, GB, Device, device_of
from megarl.plan.engines import plan_engine
from megarl.plan.facts import facts
from megarl.plan.forward import Pipeline, stage_seconds
from megarl.plan.generation import decode_seconds
from megarl.plan.parameters import language_elements
from megarl.plan.remedies import offloaded, parked
from megarl.plan.search import FittingLayout, search
from megarl.plan.times import StepTimes, reduce_seconds
from megarl.plan.whole import Models, Plan, build, models_of
from tests.published_models import MODELS, config_of, description_of

ROOT = Path(__file__).parent.parent
SPEEDS = Path(__file__).with_name("published_speeds.yaml")
LAYOUTS, PAGE = Path(__file__).with_name("published_layouts.yaml"), ROOT / "megarl" / "plan" / "figures.md"
BASE = ROOT / "examples" / "qwen3_30b_a3b" / "gspo.yaml"
SEQUENCE, PROMPT = 4096, 250  # tokens of a sequence in pretraining, and of a prompt where it is not published
WHOLE = 2**30 / 10**9  # a GPU of nominally 80 GB has 80 GiB
WITHIN = 1.15  # of the plan's best: a published layout that takes longer is one on which plan and publisher disagree


def main() -> None:
    """Print the tables."""
    top = argparse.ArgumentParser(prog="python -m tools.calibrate_plan", description=__doc__)
    top.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(ROOT)}")
    given = top.parse_args()
    rows, speeds = yaml.safe_load(LAYOUTS.read_text()), yaml.safe_load(SPEEDS.read_text())
    with tempfile.TemporaryDirectory() as directory:
        steps = steps_table(speeds["steps"], rows, Path(directory))
        parts = [layouts_table(rows, Path(directory)), steps, training_table(speeds["training"]), decoding_table(speeds["decoding"])]
    tables = "\n\n".join(parts)
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
            cells += ["nothing fits" if plan.faults else "nothing else fits", ""]
        if not layouts and not plan.faults:
            ratios.append((1.0, 1.0))
            cells += ["", ""]
        elif not plan.faults:
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


def steps_table(speeds: list[dict[str, Any]], rows: list[dict[str, Any]], directory: Path) -> str:
    """Return the table of whole steps, planned with their mean lengths."""
    lines = [
        "| step | mean length | published tokens/s/GPU | planned | planned / published | planned seconds |",
        "|---|---|---|---|---|---|",
    ]
    for speed in speeds:
        row = next(row for row in rows if row["source"].endswith(speed["row"]))
        config, models, device = planned(row, directory)
        plan = build(config, models, device, memory(row), remedies=False, mean_length=speed["length"] / sum(row["tokens"]))
        assert plan.times is not None
        prompts, samples, _ = row["batch"]
        rate = prompts * samples * speed["length"] / plan.times.step / plan.gpus
        phases = ", ".join(f"{phase} {getattr(plan.times, phase):.0f}" for phase in ("generate", "score", "update", "sync", "park"))
        what = f"{row['model']}, {plan.gpus} {device.name} ({speed['row']})"
        lines.append(f"| {what} | {speed['length']} | {speed['rate']:g} | {rate:.0f} | {rate / speed['rate']:.2f} | {phases} |")
    return "\n".join(lines)


def training_table(speeds: list[dict[str, Any]]) -> str:
    """Return the table of pretraining."""
    lines = ["| training on H100 | published tokens/s/GPU | planned | planned / published | source |", "|---|---|---|---|---|"]
    for speed in speeds:
        rate = training_rate(speed)
        what = f"{speed['model']}, {speed['layout']['ranks']} GPUs, {_shape(speed['layout'])}"
        lines.append(f"| {what} | {speed['rate']} | {rate:.0f} | {rate / speed['rate']:.2f} | {speed['source']} |")
    return "\n".join(lines)


def training_rate(speed: Mapping[str, Any]) -> float:
    """The tokens a second and GPU that the plan computes for a row of pretraining: three passes, and the exchange of gradients."""
    model, layout, (batch, size) = description_of(MODELS[speed["model"]]), Layout(etp=1, **speed["layout"]), speed["batch"]
    its, elements = facts(model), language_elements(model)
    both = its.n.layers - -(-its.n.layers // layout.pp) * (layout.pp - 2)
    ends = {"num_layers_in_first_pipeline_stage": both - both // 2, "num_layers_in_last_pipeline_stage": both // 2}
    fields = (ends if its.n.layers % layout.pp else {}) | ({"moe_token_dispatcher_type": "flex"} if speed.get("flex") else {})
    whole = layout.model_copy(update={"vpp": None})  # since `stage_seconds` divides no stage into chunks of unequal size
    stages = stage_seconds(its, elements, whole, fields, DEVICES["H100"], size * SEQUENCE, SEQUENCE, training=True)
    passes = 3 * Pipeline(stages, batch // layout.dp // size, layout.vpp or 1).seconds
    return batch * SEQUENCE / (passes + reduce_seconds(elements, its, layout, DEVICES["H100"])) / layout.ranks


def decoding_table(speeds: list[dict[str, Any]]) -> str:
    """Return the table of decoding steps."""
    lines = ["| decoding on H100 | sequences | mean response | published ms | planned | planned / published |", "|---|---|---|---|---|---|"]
    for speed in speeds:
        ms = 1000 * decoding_seconds(speed)
        cells = (f"{speed['model']}, {speed['gpus']} GPUs", speed["running"], speed["response"], speed["ms"])
        lines.append(f"| {' | '.join(map(str, cells))} | {ms:.1f} | {ms / speed['ms']:.2f} |")
    return "\n".join(lines)


def decoding_seconds(speed: Mapping[str, Any]) -> float:
    """The seconds that the plan computes for a row of decoding steps, with responses half as long as they become."""
    model, apart = description_of(MODELS[speed["model"]]), speed["gpus"] > 1
    engine = plan_engine(model, RolloutSettings(tp=speed["gpus"], expert_parallel=apart), "bfloat16", 80 * GB)
    tokens = PROMPT + speed["response"] / 2
    return decode_seconds(facts(model), language_elements(model), engine, DEVICES["H100"], speed["running"], tokens, expert_parallel=apart)


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
    mode = "free" if "lag" in row else "ahead" if row.get("ahead") else "sync"
    prompts, samples, mini_batches = row["batch"]
    megatron = {f"num_layers_in_{end}_pipeline_stage": row[end] for end in ("first", "last") if end in row}
    megatron |= {"moe_token_dispatcher_type": "flex"} if row.get("flex") else {}
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
        "rollout.expert_parallel": dp > 1 or (tp > 1 and bool(row.get("fp8"))),  # blocks of float8 are not cut
        "rollout.gpu_memory_fraction": row["share"],
        "rollout.max_num_seqs": 1024,  # vLLM's default on such GPUs; none of the files sets another
        "rollout.quantization": "fp8" if row.get("fp8") else None,
        "rollout.max_prompt_tokens": row["tokens"][0],
        "rollout.max_response_tokens": row["tokens"][1],
        "rollout.samples_per_prompt": samples,
        "rollout.mode": mode,
        "rollout.max_lag": row.get("lag"),
        **({"algorithm.correction": {"type": "tis"}} if mode != "sync" else {}),
        "train.prompts_per_step": prompts,
        "train.mini_batches": mini_batches,
        "train.micro_batch_tokens": max(row["micro"], sum(row["tokens"])),
        "placement.engines": "shared" if shared else "apart",
        "sync.transport": "cuda_ipc" if shared else "nccl",
    }
    config = load(BASE, [f"{key}={json.dumps(value)}" for key, value in given.items()], TrainConfig)
    return config, models_of(config), DEVICES["H100"] if memory(row) == 80 else device_of(memory(row))


def fitting(config: TrainConfig, models: Models, device: Device, row: Mapping[str, Any]) -> tuple[Plan, str]:
    """Plan a published configuration; if its file keeps the optimizer in host memory, or it does not fit otherwise, also with that.

    It may use the whole of a GPU, of which the plan leaves a part as headroom, since others have run it.
    """
    tries = {"": config, ", models take turns": parked(config), ", Adam in host memory": offloaded(parked(config))}
    if row.get("offload"):
        tries.pop(", models take turns")
    for how, tried in tries.items():
        for gb in (memory(row), memory(row) * WHOLE):
            plan = build(tried, models, device, gb, remedies=False)
            if not plan.faults:
                return plan, how
    return plan, how


def _shape(sizes: Mapping[str, Any]) -> str:
    return " ".join(f"{size}{sizes[size]}" for size in ("tp", "pp", "cp", "ep", "dp") if sizes.get(size, 1) > 1) or "none"


if __name__ == "__main__":
    main()
