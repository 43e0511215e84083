"""Layouts and engines for a number of GPUs, each planned; those that fit, ranked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from pydantic import ValidationError

from megarl.cluster.demand import assign_roles
from megarl.config import Layout, TrainConfig
from megarl.errors import ConfigError
from megarl.models.families import family_of
from megarl.plan.devices import NODE, Device
from megarl.plan.whole import Models, build

POWERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits."""

    layout: Layout
    replicas: int
    engine_tp: int
    bytes: float  # of the worst rank
    live: float  # sequences of the greatest length in an engine
    seconds: float  # of a step
    changes: tuple[str, ...]  # overrides that make it of the configuration


def search(
    config: TrainConfig, models: Models, device: Device, memory_gb: float, gpus: int, *, shared: bool, most: int = 8
) -> list[FittingLayout]:
    """The quickest layouts that fit; among those within a tenth of each other, the one with the fewest changes first.

    Args:
        config: of the run, whose batch, recomputation and engines' share of memory stay.
        models: of `models_of`.
        device: whose speed the times follow from.
        memory_gb: of each GPU.
        gpus: how many there are.
        shared: engines and ranks take turns on all of them; else each GPU is a rank's or an engine's.
        most: how many are returned.
    """
    if config.placement.critic or config.placement.reference or config.placement.reward:
        return []  # the ranks of several groups are not dealt out here
    found = []
    for tried in _candidates(config, models["model"], gpus, shared=shared):
        try:
            plan = build(tried, models, device, memory_gb, gpus)
        except ConfigError:
            continue
        if not plan.faults and plan.engine is not None and plan.times is not None:
            layout = tried.layout
            worst = max(group.worst.total for group in plan.groups)
            rollout = tried.rollout
            changes = _changes(config, tried)
            found.append(FittingLayout(layout, rollout.replicas, rollout.tp, worst, plan.engine.live, plan.times.step, changes))
    if not found:
        return []
    quickest = min(one.seconds for one in found)
    found.sort(key=lambda one: (int(10 * (one.seconds / quickest - 1)), len(one.changes), one.seconds, one.bytes))
    return found[:most]


def _candidates(config: TrainConfig, hf: dict[str, Any], gpus: int, *, shared: bool) -> Iterator[TrainConfig]:
    n = family_of(hf).sizes(hf)
    splits = {gpus} if shared else {config.layout.ranks, gpus // 4, gpus // 2, gpus - gpus // 4} & set(range(1, gpus))
    sizes = [[size for size in POWERS if size <= most] for most in (NODE, 16, NODE, n.experts or 1)]
    offloads = {config.placement.offload, len(assign_roles(config)[0][0]) > 1}
    for ranks, (tp, pp, cp, ep), engine_tp, offload in product(sorted(splits), product(*sizes), (1, 2, 4, 8), offloads):
        engine_gpus = gpus if shared else gpus - ranks
        if engine_gpus % engine_tp:
            continue
        try:
            layout = Layout(ranks=ranks, tp=tp, pp=pp, cp=cp, ep=ep, etp=1)
        except ValidationError:
            continue
        sequences = config.train.prompts_per_step * config.rollout.samples_per_prompt // config.train.mini_batches
        if layout.dp > sequences:
            continue
        model = config.model.model_copy(update={"megatron": _stages(config.model.megatron, config.layout.pp, layout, n.layers)})
        rollout = config.rollout.model_copy(update={"tp": engine_tp, "replicas": engine_gpus // engine_tp})
        placement = config.placement.model_copy(update={"offload": offload})
        yield config.model_copy(update={"layout": layout, "rollout": rollout, "model": model, "placement": placement})


def _stages(megatron: Mapping[str, Any], pp: int, layout: Layout, layers: int) -> dict[str, Any]:
    """`model.megatron`, given for `pp` stages, with the pipeline's ends shortened where the layout's stages do not divide the layers."""
    fields = dict(megatron)
    if layout.pp == pp:
        return fields
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    fields = {key: value for key, value in fields.items() if key not in ends}
    if layers % layout.pp and layout.pp > 2:
        rest = layers - -(-layers // layout.pp) * (layout.pp - 2)
        if rest > 1:
            fields |= {ends[0]: rest - rest // 2, ends[1]: rest // 2}
    return fields


def _changes(config: TrainConfig, tried: TrainConfig) -> tuple[str, ...]:
    """The overrides that differ from the configuration."""
    pairs = [(f"layout.{key}", getattr(config.layout, key), getattr(tried.layout, key)) for key in Layout.model_fields]
    pairs += [(f"rollout.{key}", getattr(config.rollout, key), getattr(tried.rollout, key)) for key in ("replicas", "tp")]
    pairs.append(("placement.offload", config.placement.offload, tried.placement.offload))
    keys = config.model.megatron.keys() | tried.model.megatron.keys()
    pairs += [(f"model.megatron.{key}", config.model.megatron.get(key), tried.model.megatron.get(key)) for key in sorted(keys)]
    return tuple(f"{key}={json.dumps(new)}" for key, old, new in pairs if old != new)
