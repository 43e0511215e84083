"""`megarl plan`: the command line."""

import argparse
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, RunSettings, TrainConfig, load
from megarl.imports import find
from megarl.models.megatron_fields import check_fields, fixed_fields
from megarl.models.optimizer_fields import check_optimizer
from megarl.plan.devices import DEVICES, MEMORY_GB, device_of
from megarl.plan.search import FittingLayout, nearest, search
from megarl.plan.whole import Plan, build, models_of
from megarl.text.stdout import say
from megarl.verbs import VERBS

MAX_NUMBER = 1_000_000  # upper limit of --gpus and --gpu-gb
PLANNED = ("train", "sft", "rm", "dpo")


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    top = argparse.ArgumentParser(
        prog="megarl plan",
        description="What a configuration needs, from config.json alone: bytes on each rank, engine and node, seconds per step, what "
        "does not fit, and layouts that do. Starts nothing and needs neither weights nor GPUs.",
    )
    top.add_argument("config", type=Path, metavar="CONFIG.yaml")
    top.add_argument("overrides", nargs="*", metavar="a.b=c", help="overrides a configuration value, as YAML")
    top.add_argument("--verb", choices=PLANNED, default="train", help="the verb that the configuration is for (default: train)")
    top.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: as many as the configuration uses)")
    top.add_argument("--gpu-gb", type=float, metavar="M", help="memory of each (default: cluster.gpu_memory_gb, or 80)")
    top.add_argument("--device", choices=DEVICES, help="GPU type that the times are computed for (default: by memory)")
    top.add_argument("--engine-device", choices=DEVICES, help="GPU type of the engines, if another (as many ranks as configured)")
    top.add_argument("--json", action="store_true", help="JSON output, for programs")
    return top


def main(arguments: Sequence[str]) -> int:
    """Print the plan. Returns 1 if the configuration, one for GPUs, does not fit, and no layout does."""
    options = parser().parse_intermixed_args(arguments)
    for option, value in (("--gpus", options.gpus), ("--gpu-gb", options.gpu_gb)):
        if value is not None and not 0 < value <= MAX_NUMBER:
            raise ConfigError(f"plan: {option} {value}: must be above 0, and {MAX_NUMBER:,} at most")
    root: Any = find(VERBS[options.verb].config)
    config: RunSettings = load(options.config, options.overrides, root)
    memory = options.gpu_gb or (DEVICES[options.device].memory_gb if options.device else config.cluster.gpu_memory_gb or MEMORY_GB)
    device = device_of(memory, config.cluster.gpus_per_node, options.device)
    if options.engine_device is not None:
        device = replace(device, engines=device_of(0, config.cluster.gpus_per_node, options.engine_device))
        if not isinstance(config, TrainConfig) or config.placement.engines == "shared":
            what = "placement.engines=shared" if isinstance(config, TrainConfig) else f"megarl {options.verb}"
            raise ConfigError(f"plan: --engine-device {options.engine_device}: with {what} engines have no GPUs of their own")
    models = models_of(config)
    check_fields(config.model.megatron, fixed_fields(models["model"], config.model.dtype, config.layout), config.model.recompute)
    for key, optimizer in config.optimizers.items():
        check_optimizer(key, optimizer)
    plan = build(config, models, device, memory, options.gpus)
    layouts = search(config, models, device, memory, plan.gpus)
    closest = nearest(config, models, device, memory, plan.gpus) if plan.faults and not layouts else None
    say(json.dumps(_plain(plan, layouts), indent=1)) if options.json else _show(plan, layouts, closest)
    return int(config.cluster.gpus and bool(plan.faults) and not layouts)


def _plain(plan: Plan, fitting: Sequence[FittingLayout]) -> dict[str, Any]:
    layouts = [{**asdict(one), "layout": one.layout.model_dump()} for one in fitting]
    groups = [
        {
            "name": group.name,
            "layout": group.layout.model_dump(),
            "stages": [{**asdict(stage), "total": stage.total} for stage in group.stages],
            "worst": group.worst.rank,
        }
        for group in plan.groups
    ]
    return {**asdict(plan), "groups": groups, "layouts": layouts}


def _show(plan: Plan, layouts: Sequence[FittingLayout], closest: str | None) -> None:
    from rich.console import Console

    from megarl.plan.show import tables

    terminal, text = os.isatty(1), io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=None if terminal else 160, highlight=False)
    for part in tables(plan, layouts, closest):
        console.print(part, soft_wrap=isinstance(part, str), markup=False)
    say(text.getvalue().rstrip("\n"))
