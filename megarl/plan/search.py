"""Plan layouts and engines for a number of GPUs, and rank those that fit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from megarl.cluster.process_kinds import assign_roles
from megarl.config import Layout, RolloutSettings, RunSettings, SftConfig, StepSettings, SupervisedConfig, TrainConfig
from megarl.config.supervised import SupervisedSettings
from megarl.errors import ConfigError
from megarl.models.description import ModelDescription
from megarl.plan.devices import GB, MEMORY_GB, NODE, Device, device_of, of_engines
from megarl.plan.engines import EngineMemory, plan_engine
from megarl.plan.remedies import overrides, quantized, ways
from megarl.plan.whole import Models, Plan, build, models_of

ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
UNIT = 1024  # tokens, to which the length of micro-batches is rounded up
MICRO_BATCHES = (1, 2, 4)  # times as long as the longest sequence
POWERS = (1, 2, 4, 8, 16, 32, 64)
ENGINES = (1, 2, 4, 8)  # tensor parallel sizes of an engine
SPREAD, WIDE = (2, 4, 8, 16), (4, 8)  # data parallel sizes of its attention, and tensor parallel sizes, if it has GPUs of several nodes


Trained = TrainConfig | SupervisedConfig
Settings = TypeVar("Settings", bound=RunSettings)


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
    """Return the quickest layouts that fit, each with its best engines, micro-batches and pipeline stages. Of those that are within a tenth
    of the quickest, the one with the fewest pipeline stages comes first, then that with the smallest groups, and so in each further tenth.

    Layouts are tried with the smallest micro-batches; the quickest of those that fit also with larger ones, and with stages of other sizes.
    If nothing fits, the first of the remedies (`ways`) with which something does is taken; if none helps, all of that once more with
    engines spread over nodes (or from the start, if the weights take most of an engine of one node).

    Args:
        config: the run's configuration, whose batch and engines' share of memory stay.
        models: the result of `models_of`.
        device: the GPU from whose speed the times are computed.
        memory_gb: the memory of each GPU.
        gpus: the number of GPUs, each for a rank or an engine, or for both if they take turns.
        most: the number of layouts to return.
    """
    model = models["model"]

    def fitting(candidates: Iterable[Trained]) -> list[tuple[FittingLayout, Trained]]:
        plans = _plans(candidates, models, device, memory_gb, gpus)
        best = dict[Layout, list[tuple[FittingLayout, Trained]]]()
        for tried, plan in plans:
            if not plan.faults:
                best.setdefault(tried.layout, []).append((_fitting(config, tried, plan), tried))
        return sorted((_smallest_of_quickest(ones) for ones in best.values()), key=lambda one: one[0].seconds)

    apart = device.engines is not None
    for engines, way in product(_engines(config, model, *of_engines(device, memory_gb)), ways(config, gpus, apart=apart)):
        quickest = fitting(_candidates(_smallest(way), model, device, gpus, engines))[: 2 * most]
        if quickest:
            refined = fitting(other for _, tried in quickest for other in _refinements(config, tried, model))
            quickest_s = min(one.seconds for one, _ in refined)
            return sorted((one for one, _ in refined), key=lambda one: _rank(one, quickest_s))[:most]
    return []


def _smallest_of_quickest(ones: list[tuple[FittingLayout, Trained]]) -> tuple[FittingLayout, Trained]:
    """Of those within a fiftieth of the quickest, the one that needs the least of a GPU."""
    quickest_s = min(one.seconds for one, _ in ones)
    return min((one for one in ones if one[0].seconds <= 1.02 * quickest_s), key=lambda one: (one[0].bytes, len(one[0].changes)))


def _rank(one: FittingLayout, quickest_s: float) -> tuple[float, ...]:
    layout = one.layout
    return int(10 * (one.seconds / quickest_s - 1)), layout.pp, layout.cp, layout.tp, one.seconds


def _fitting(config: RunSettings, tried: Trained, plan: Plan) -> FittingLayout:
    assert plan.times is not None
    worst = max(group.worst.total for group in plan.groups)
    engine, replicas = plan.engine, tried.rollout.replicas if isinstance(tried, TrainConfig) else 0
    tp, dp, live = (engine.tp, engine.dp, engine.live) if engine is not None else (0, 0, 0.0)
    host = plan.host.total if plan.host is not None else 0
    return FittingLayout(tried.layout, replicas, tp, dp, worst, host, live, plan.times.step, overrides(config, tried))


def nearest(config: RunSettings, models: Models, device: Device, memory_gb: float, gpus: int) -> str | None:
    """Return the overrides of the layout that needs the least of a GPU, and what it needs, if none fits; None if there is no layout.

    Args:
        config: the run's configuration.
        models: the result of `models_of`.
        device: the GPU from whose speed the times are computed.
        memory_gb: the memory of each GPU.
        gpus: the number of GPUs.
    """
    last = ways(config, gpus, apart=device.engines is not None)[-2:]  # with everything that saves memory, engines apart and not
    near, far = _shapes(config, models["model"], of_engines(device, memory_gb)[0])
    engines = [*near, *far]
    candidates = (each for way in last for each in _candidates(_smallest(way), models["model"], device, gpus, engines))
    plans = list(_plans(candidates, models, device, memory_gb, gpus))
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
    model, memory_gb = models_of(config)["model"], config.cluster.gpu_memory_gb or MEMORY_GB
    sizes, node = model.sizes, device_of(memory_gb, config.cluster.gpus_per_node).node
    divided = (tp for tp in ENGINES if tp <= node and sizes.heads % tp == 0 and sizes.expert_ffn % tp == 0)
    engines = (plan_engine(model, RolloutSettings(tp=tp), "bfloat16", memory_gb * GB) for tp in divided)
    return next((engine.tp for engine in engines if engine.room), None)


def _engines(config: RunSettings, model: ModelDescription, device: Device, memory_gb: float) -> list[list[EngineShape]]:
    """The engines to be tried together, and those to be tried if nothing fits with these. Each has room for a sequence.

    Engines spread over nodes are for models whose weights would take most of an engine of one node.
    """
    if not isinstance(config, TrainConfig):
        return [[]]
    rollout, dtype = config.rollout, config.rollout.dtype or config.model.dtype

    def roomy(shapes: Sequence[EngineShape]) -> dict[EngineShape, EngineMemory]:
        planned = {shape: plan_engine(model, shape.of(rollout), dtype, memory_gb * GB) for shape in shapes}
        return {shape: engine for shape, engine in planned.items() if engine.room}

    near, far = (roomy(shapes) for shapes in _shapes(config, model, device))
    crowded = all(engine.weights > engine.cache for engine in near.values())
    return [[*near, *far]] if crowded else [[*near], [*far]]


def _shapes(config: RunSettings, model: ModelDescription, device: Device) -> tuple[list[EngineShape], list[EngineShape]]:
    """Engines with data-parallel attention as configured; and if that is none, those that it would spread over nodes."""
    if not isinstance(config, TrainConfig):
        return [], []
    dp, apart = config.rollout.dp, config.rollout.expert_parallel
    near = [EngineShape(tp, dp, apart) for tp in ENGINES if tp <= device.node]
    if dp > 1 or not model.sizes.experts:
        return near, []
    return near, [EngineShape(tp, dp, True) for dp in SPREAD for tp in WIDE if tp <= device.node < dp * tp]


def _plans(candidates: Iterable[Trained], models: Models, device: Device, memory_gb: float, gpus: int) -> Iterator[tuple[Trained, Plan]]:
    for tried in candidates:
        try:
            yield tried, build(tried, models, device, memory_gb, gpus, remedies=False)
        except ConfigError:  # the layout does not divide the model
            continue


def _micro_batches(config: RunSettings) -> tuple[str, StepSettings | SupervisedSettings, int]:
    """The section that limits the tokens of a micro-batch, its key, and the tokens that it must have room for."""
    if isinstance(config, SupervisedConfig):
        sides = 1 if isinstance(config, SftConfig) else 2
        return config.section, config.supervised, sides * config.supervised.max_tokens
    assert isinstance(config, TrainConfig)
    return "train", config.train, config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def _with_tokens(config: Settings, tokens: int) -> Settings:
    key, section, _ = _micro_batches(config)
    return config.model_copy(update={key: section.model_copy(update={"micro_batch_tokens": tokens})})


def _smallest(config: Settings) -> Settings:
    """The configuration with the smallest micro-batches that have room for its longest sequence, unless its own are smaller."""
    _, section, longest = _micro_batches(config)
    return _with_tokens(config, min(section.micro_batch_tokens, -(-longest // UNIT) * UNIT))


def _refinements(config: RunSettings, tried: Trained, model: ModelDescription) -> Iterator[Trained]:
    """What fits with small micro-batches and equal stages, with other micro-batches and stages.

    Args:
        config: the run's configuration.
        tried: what fits.
        model: the policy.
    """
    smallest, given = _micro_batches(tried)[1].micro_batch_tokens, _micro_batches(config)[1].micro_batch_tokens
    critic = config.critic.micro_batch_tokens if isinstance(config, TrainConfig) and config.critic is not None else None
    sizes = [size for size in dict.fromkeys((given, *(smallest * times for times in MICRO_BATCHES))) if critic is None or size <= critic]
    for fields, tokens in product(_stages(config, tried.layout, model), sizes):
        yield _with_tokens(tried.model_copy(update={"model": tried.model.model_copy(update={"megatron": fields})}), tokens)


def _candidates(
    config: RunSettings, model: ModelDescription, device: Device, gpus: int, engines: Sequence[EngineShape]
) -> Iterator[Trained]:
    """The configuration with every layout and every set of engines to be tried on so many GPUs."""
    n = model.sizes
    experts = n.experts or 1

    def laid_out(layout: Layout) -> dict[str, Any]:
        fields = next(_stages(config, layout, model))
        return {"layout": layout, "model": config.model.model_copy(update={"megatron": fields})}

    if isinstance(config, SupervisedConfig):
        for layout in _layouts(gpus, experts, config.supervised.batch_size, device):
            yield config.model_copy(update=laid_out(layout))
        return
    assert isinstance(config, TrainConfig)
    placement = config.placement
    if placement.critic or placement.reference or placement.reward or placement.teacher or placement.teacher_engines:
        return  # the search does not split ranks among several groups
    shared = config.placement.engines == "shared"
    ranks = {config.layout.ranks} if device.engines is not None else {config.layout.ranks, gpus // 4, gpus // 2, gpus - gpus // 4}
    splits = {gpus} if shared else ranks & set(range(1, gpus))  # as many ranks as there are GPUs of their kind, where there are two kinds
    sequences = config.train.prompts_per_step * config.rollout.samples_per_prompt // config.train.mini_batches
    offloads = {config.placement.offload, len(assign_roles(config)[0][0]) > 1}
    for own in sorted(splits):
        engine_gpus = gpus if shared else gpus - own
        for layout, shape, offload in product(_layouts(own, experts, sequences, device), engines, sorted(offloads)):
            replicas, rest = divmod(engine_gpus, shape.tp * shape.dp)
            if replicas and not rest:
                changes = {
                    "rollout": shape.of(config.rollout, replicas=replicas),
                    "placement": placement.model_copy(update={"offload": offload}),
                }
                yield config.model_copy(update={**laid_out(layout), **changes})


def _layouts(ranks: int, experts: int, sequences: int, device: Device) -> Iterator[Layout]:
    """The layouts of so many ranks in which each data-parallel rank has a sequence, and groups that exchange much are linked."""
    near = min(NODE, device.linked)
    sizes = [[size for size in POWERS if size <= most] for most in (near, 16, near, experts)]
    for tp, pp, cp, ep in product(*sizes):
        try:
            layout = Layout(ranks=ranks, tp=tp, pp=pp, cp=cp, ep=ep, etp=1)
        except ValidationError:
            continue
        if layout.dp <= sequences:
            yield layout


def _stages(config: RunSettings, layout: Layout, model: ModelDescription) -> Iterator[dict[str, Any]]:
    """`model.megatron` for the pipeline stages of a layout: as it is given for so many stages; else with stages as equal as they can be,
    and then with a shorter last one, which also has the output layer.

    Args:
        config: the run's configuration.
        layout: a layout.
        model: the policy.
    """
    fields, layers = dict(config.model.megatron), model.sizes.layers
    if layout.pp == config.layout.pp:
        yield fields
        return
    fields = {key: value for key, value in fields.items() if key not in ENDS}
    equal = -(-layers // layout.pp)  # layers of a stage
    if layers % layout.pp == 0:
        yield fields
    elif layers - equal * (layout.pp - 2) < 2:
        yield fields  # which the model cannot be divided into
        return
    for each in (equal, equal + 1) if layout.pp > 1 else ():
        both = layers - each * (layout.pp - 2)  # layers of the first and the last stage
        for last in range(min(both // 2, each), max(0, both - each) - 1, -1):
            if last > 0 and both - last <= each and (last, both - last) != (each, each):
                yield fields | dict(zip(ENDS, (both - last, last), strict=True))
