"""Plan layouts and engines for a number of GPUs, and rank those that fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from pydantic import ValidationError

from megarl.cluster.process_kinds import assign_roles
from megarl.config import Layout, LearnConfig, RolloutSettings, RunSettings, TrainConfig
from megarl.errors import ConfigError
from megarl.models.description import ModelDescription
from megarl.plan.devices import GB, MEMORY_GB, NODE, Device
from megarl.plan.engines import EngineMemory, plan_engine
from megarl.plan.remedies import overrides, quantized, ways
from megarl.plan.whole import Models, Plan, build, models_of

POWERS = (1, 2, 4, 8, 16, 32, 64)
ENGINES = (1, 2, 4, 8)  # tensor parallel sizes of an engine
SPREAD, WIDE = (2, 4, 8, 16), (4, 8)  # data parallel sizes of its attention, and tensor parallel sizes, if it has GPUs of several nodes


class EngineShape(NamedTuple):
    """What the search changes of an engine, as in the section `rollout`."""

    tp: int
    dp: int
    expert_parallel: bool

    def of(self, rollout: RolloutSettings, **changes: Any) -> RolloutSettings:
        """Return the section with engines of this shape, and other changes."""
        return rollout.model_copy(update={**self._asdict(), **changes})


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits."""

    layout: Layout
    replicas: int  # engines; 0: a stage without them
    engine_tp: int
    engine_dp: int
    bytes: float  # of the worst rank
    host: float  # bytes of host memory on a node; 0: not planned
    live: float  # sequences of the greatest length that an engine's KV cache holds
    seconds: float  # of a step
    changes: tuple[str, ...]  # overrides that turn the configuration into it


def search(config: RunSettings, models: Models, device: Device, memory_gb: float, gpus: int, *, most: int = 8) -> list[FittingLayout]:
    """Return the quickest layouts that fit; among those within a tenth of each other, the one with the fewest changes first.

    The configuration is tried as it is; if nothing fits, with the first of the remedies (`ways`) with which something does; if none helps,
    all of that once more with engines spread over nodes (or from the start, if the weights take most of an engine of one node).

    Args:
        config: the run's configuration, whose batch and engines' share of memory stay.
        models: the result of `models_of`.
        device: the GPU from whose speed the times are computed.
        memory_gb: the memory of each GPU.
        gpus: the number of GPUs, each for a rank or an engine, or for both if they take turns.
        most: the number of layouts to return.
    """
    model = models["model"]
    for engines, way in product(_engines(config, model, memory_gb), ways(config, gpus)):
        layouts = []
        for tried, plan in _plans(way, models, device, memory_gb, gpus, engines):
            if not plan.faults and plan.times is not None:
                worst = max(group.worst.total for group in plan.groups)
                engine, replicas = plan.engine, tried.rollout.replicas if isinstance(tried, TrainConfig) else 0
                tp, dp, live = (engine.tp, engine.dp, engine.live) if engine is not None else (0, 0, 0.0)
                host, changes = plan.host.total if plan.host is not None else 0, overrides(config, tried)
                layouts.append(FittingLayout(tried.layout, replicas, tp, dp, worst, host, live, plan.times.step, changes))
        if layouts:
            quickest = min(one.seconds for one in layouts)
            layouts.sort(key=lambda one: (int(10 * (one.seconds / quickest - 1)), len(one.changes), one.seconds, one.bytes))
            return layouts[:most]
    return []


def nearest(config: RunSettings, models: Models, device: Device, memory_gb: float, gpus: int) -> str | None:
    """Return the overrides of the layout that needs the least of a GPU, and what it needs, if none fits; None if there is no layout.

    Args:
        config: the run's configuration.
        models: the result of `models_of`.
        device: the GPU from whose speed the times are computed.
        memory_gb: the memory of each GPU.
        gpus: the number of GPUs.
    """
    last = ways(config, gpus)[-2:]  # with everything that saves memory, engines apart and not
    near, far = _shapes(config, models["model"])
    plans = [each for way in last for each in _plans(way, models, device, memory_gb, gpus, [*near, *far])]
    if not plans:
        return None
    tried, plan = min(plans, key=lambda each: each[1].need)
    needs = f"needs {plan.need / GB:.1f} GB of a GPU" if plan.need > plan.memory else f"lacks something else: {plan.faults[0]}"
    return f"{' '.join(overrides(config, tried))} {needs}{_smaller(config, models, device, memory_gb, gpus)}"


def _smaller(config: RunSettings, models: Models, device: Device, memory_gb: float, gpus: int) -> str:
    """Whether something fits with quantised engines. It is not chosen for the user, since their policy differs by more than rounding."""
    if not isinstance(config, TrainConfig) or quantized(config) == config:
        return ""
    return "; with rollout.quantization=fp8 there are layouts that fit" * bool(
        search(quantized(config), models, device, memory_gb, gpus, most=1)
    )


def smallest_engine(config: RunSettings) -> int | None:
    """Return how many of the run's GPUs `megarl generate` needs for the run's model: an engine on them. None if a node has too few."""
    if not config.cluster.gpus:
        return 1
    model, memory = models_of(config)["model"], (config.cluster.gpu_memory_gb or MEMORY_GB) * GB
    sizes = model.sizes
    divided = (tp for tp in ENGINES if sizes.heads % tp == 0 and sizes.expert_ffn % tp == 0)
    engines = (plan_engine(model, RolloutSettings(tp=tp), "bfloat16", memory) for tp in divided)
    return next((engine.tp for engine in engines if engine.room), None)


def _engines(config: RunSettings, model: ModelDescription, memory_gb: float) -> list[list[EngineShape]]:
    """The engines to be tried together, and those to be tried if nothing fits with these. Each has room for a sequence.

    Engines spread over nodes are for models whose weights would take most of an engine of one node.
    """
    if not isinstance(config, TrainConfig):
        return [[]]
    rollout, dtype = config.rollout, config.rollout.dtype or config.model.dtype

    def roomy(shapes: Sequence[EngineShape]) -> dict[EngineShape, EngineMemory]:
        planned = {shape: plan_engine(model, shape.of(rollout), dtype, memory_gb * GB) for shape in shapes}
        return {shape: engine for shape, engine in planned.items() if engine.room}

    near, far = (roomy(shapes) for shapes in _shapes(config, model))
    crowded = all(engine.weights > engine.cache for engine in near.values())
    return [[*near, *far]] if crowded else [[*near], [*far]]


def _shapes(config: RunSettings, model: ModelDescription) -> tuple[list[EngineShape], list[EngineShape]]:
    """Engines with data-parallel attention as configured; and if that is none, those that it would spread over nodes."""
    if not isinstance(config, TrainConfig):
        return [], []
    dp, apart = config.rollout.dp, config.rollout.expert_parallel
    near = [EngineShape(tp, dp, apart) for tp in ENGINES]
    if dp > 1 or not model.sizes.experts:
        return near, []
    return near, [EngineShape(tp, dp, True) for dp in SPREAD for tp in WIDE if dp * tp > NODE]


def _plans(
    config: RunSettings, models: Models, device: Device, memory_gb: float, gpus: int, engines: Sequence[EngineShape]
) -> Iterator[tuple[TrainConfig | LearnConfig, Plan]]:
    for tried in _candidates(config, models["model"], gpus, engines):
        try:
            yield tried, build(tried, models, device, memory_gb, gpus, remedies=False)
        except ConfigError:  # the layout does not divide the model
            continue


def _candidates(
    config: RunSettings, model: ModelDescription, gpus: int, engines: Sequence[EngineShape]
) -> Iterator[TrainConfig | LearnConfig]:
    """The configuration with every layout and every set of engines to be tried on so many GPUs."""
    n = model.sizes
    experts = n.experts or 1

    def laid_out(layout: Layout) -> dict[str, Any]:
        fields = _stages(config.model.megatron, config.layout.pp, layout, n.layers)
        return {"layout": layout, "model": config.model.model_copy(update={"megatron": fields})}

    if isinstance(config, LearnConfig):
        for layout in _layouts(gpus, experts, config.learn.batch_size):
            yield config.model_copy(update=laid_out(layout))
        return
    assert isinstance(config, TrainConfig)
    if config.placement.critic or config.placement.reference or config.placement.reward:
        return  # the search does not split ranks among several groups
    shared = config.placement.engines == "shared"
    splits = {gpus} if shared else {config.layout.ranks, gpus // 4, gpus // 2, gpus - gpus // 4} & set(range(1, gpus))
    sequences = config.train.prompts_per_step * config.rollout.samples_per_prompt // config.train.mini_batches
    offloads = {config.placement.offload, len(assign_roles(config)[0][0]) > 1}
    for ranks in sorted(splits):
        engine_gpus = gpus if shared else gpus - ranks
        for layout, shape, offload in product(_layouts(ranks, experts, sequences), engines, sorted(offloads)):
            replicas, rest = divmod(engine_gpus, shape.tp * shape.dp)
            if replicas and not rest:
                placement = config.placement.model_copy(update={"offload": offload})
                changes = {"rollout": shape.of(config.rollout, replicas=replicas), "placement": placement}
                yield config.model_copy(update={**laid_out(layout), **changes})


def _layouts(ranks: int, experts: int, sequences: int) -> Iterator[Layout]:
    """The layouts of so many ranks in which each data-parallel rank has a sequence."""
    sizes = [[size for size in POWERS if size <= most] for most in (NODE, 16, NODE, experts)]
    for tp, pp, cp, ep in product(*sizes):
        try:
            layout = Layout(ranks=ranks, tp=tp, pp=pp, cp=cp, ep=ep, etp=1)
        except ValidationError:
            continue
        if layout.dp <= sequences:
            yield layout


def _stages(megatron: Mapping[str, Any], pp: int, layout: Layout, layers: int) -> dict[str, Any]:
    """`model.megatron`, given for `pp` stages, with the first and last stage shortened if the layout's stages do not divide the layers."""
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
