"""The processes that a run will have, known before any is started: its groups of model ranks and its engines."""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Literal

from megarl.cluster.placement import ProcessKind
from megarl.config import EvalConfig, Layout, PairsConfig, RolloutSettings, RunSettings, TrainConfig, TrainingSettings, model_of

Role = Literal["policy", "reference", "teacher", "critic", "reward"]
ENGINES, TEACHERS = "engines", "teachers"  # the names of their kinds


def assign_roles(config: TrainConfig) -> list[tuple[tuple[Role, ...], Layout]]:
    """The groups of ranks that a run needs: the roles of each group, and its parallel layout. The policy's group comes first."""
    needed: dict[Role, tuple[bool, Layout | None]] = {
        "reference": (config.algorithm.needs_reference, config.placement.reference),
        "teacher": (config.distillation is not None and not config.taught_apart, config.placement.teacher),
        "critic": (config.critic is not None, config.placement.critic),
        "reward": (model_of(config.reward.source) is not None, config.placement.reward),
    }
    shared: list[Role] = [role for role, (is_needed, layout) in needed.items() if is_needed and layout is None]
    separate: list[tuple[tuple[Role, ...], Layout]] = [
        ((role,), layout) for role, (is_needed, layout) in needed.items() if is_needed and layout is not None
    ]
    return [(("policy", *shared), config.layout), *separate]


def demand(config: RunSettings) -> list[ProcessKind]:
    """Every process of a run: the groups of ranks in the order of `assign_roles`, teachers that are on none, then the engines."""
    gpus = config.cluster.gpus
    if isinstance(config, EvalConfig | PairsConfig):
        return [engine_kind(config.rollout, gpus)]
    if isinstance(config, TrainConfig):
        shared = config.placement.engines == "shared" and gpus
        groups = [rank_kind(roles[0], layout, gpus) for roles, layout in assign_roles(config)]
        apart = teacher_kinds(config)
        if not shared:
            return [*groups, *apart, engine_kind(config.rollout, gpus)]
        # A data-parallel rank of an engine uses the GPUs of ranks on one node.
        together = tuple(lcm(block, config.rollout.tp) for block in groups[0].blocks)
        return [replace(groups[0], blocks=together), *groups[1:], *apart]
    return [rank_kind("model", config.layout, gpus)]


def teacher_kinds(config: TrainConfig) -> list[ProcessKind]:
    """The kind of the processes that score for teachers with engines, or through servers; none if the teachers are on model ranks."""
    if config.distillation is None or not config.taught_apart:
        return []
    count, engines = len(config.distillation.scorers), config.placement.teacher_engines
    if engines is None:
        return [ProcessKind(TEACHERS, count)]
    return [ProcessKind(TEACHERS, count * engines.replicas, engines.tp if config.cluster.gpus else 0)]


def files(config: RunSettings) -> tuple[dict[str, Path], dict[str, Path]]:
    """The files and directories that ranks and engines read, and the directories that they write to, by dotted key."""
    inputs: dict[str, Path | None] = {
        "model.path": config.model.path,
        "model.weights": config.model.weights,
        "model.base": config.model.base,
    }
    if isinstance(config, TrainConfig):
        inputs |= {"critic.path": config.critic.path if config.critic else None}
        if config.distillation is not None:
            inputs |= {f"distillation.{name}": path for name, path in config.distillation.models.items()}
        if (judge := model_of(config.reward.source)) is not None:
            inputs |= {f"{judge[0]}.path": judge[1].path}
    outputs = {"run_dir": config.directory} if isinstance(config, TrainingSettings) else {}
    return {key: path for key, path in inputs.items() if path is not None}, outputs


def processes(kinds: Sequence[ProcessKind]) -> int:
    """The number of model ranks and engines in a run with this `demand`."""
    return sum(kind.processes for kind in kinds)


def rank_kind(name: str, layout: Layout, gpus: bool) -> ProcessKind:
    """A group of model ranks.

    A tensor-parallel group always shares a node, since it communicates in every layer; expert-parallel and context-parallel groups do so
    where a node is large enough. Ranks are numbered with tp fastest, then cp, dp, pp; within the experts etp, then ep.

    Args:
        name: used in messages.
        layout: the parallel layout of the ranks.
        gpus: whether each rank has a GPU.
    """
    experts = layout.etp * layout.ep
    return ProcessKind(name, layout.ranks, int(gpus), (lcm(layout.tp * layout.cp, experts), lcm(layout.tp, experts), layout.tp))


def engine_kind(settings: RolloutSettings, gpus: bool) -> ProcessKind:
    """The engines: a process for each data-parallel rank, whose GPUs are on one node.

    As many consecutive ranks of an engine share a node as it can hold: their tokens meet at the experts in every layer.
    """
    blocks = tuple(size for size in range(settings.dp, 0, -1) if settings.dp % size == 0)
    return ProcessKind(ENGINES, settings.replicas * settings.dp, settings.tp if gpus else 0, blocks)
