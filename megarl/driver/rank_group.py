"""The driver's side of the model ranks: their places, their processes, and what a group of them computes together."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from megarl.cluster.actor_group import ActorGroup, end
from megarl.cluster.allocation import Allocation
from megarl.cluster.placement import ProcessKind
from megarl.cluster.preflight import send_away
from megarl.cluster.process_kinds import Role, files
from megarl.cluster.reserve import lost_nodes, reserve
from megarl.cluster.shared_files import check_shared, nodes_of
from megarl.config import Layout, RunSettings
from megarl.engines.worker import ExpertsWanted
from megarl.observe.metrics import Mean, Metric, Sum, merge
from megarl.ranks.megatron_worker import MegatronWorker, RankSettings
from megarl.ranks.step_plan import ScoringPlan, StepPlan

Running = list[Any]
"""References to calls that have been started and must be waited for."""


@dataclass(frozen=True)
class RankGroup(ActorGroup):
    """One group of model ranks."""

    roles: tuple[Role, ...]  # of the models that they hold together
    layout: Layout


def dealt(plan: StepPlan | ScoringPlan, layout: Layout) -> list[Any]:
    """Return a reference to its part of the plan for each rank."""
    parts = [ray.put(plan.part(dp_rank)) for dp_rank in range(layout.dp)]
    return [parts[layout.dp_rank(rank)] for rank in range(layout.ranks)]


def merged(group: RankGroup, running: Running, doing: str, timeout_s: float) -> dict[str, Metric]:
    """Wait for calls and merge their metrics. A loss is a sum over one call's mini-batch; its mean over the calls is reported.

    Args:
        group: the ranks.
        running: one or several calls on all of them.
        doing: names the work in an error.
        timeout_s: time limit.
    """
    metrics, calls = merge(group.wait(running, doing, timeout_s)), len(running) / len(group.actors)
    return {name: Mean(value.total, calls) if isinstance(value, Sum) else value for name, value in metrics.items()}


def reward_scores(group: RankGroup, plan: ScoringPlan, responses: int, timeout_s: float) -> list[float]:
    """Return the reward model's score of each response.

    Args:
        group: the ranks of the reward model.
        plan: what to score.
        responses: how many of the plan's responses are wanted, from the first on.
        timeout_s: time limit.
    """
    score_N: dict[int, float] = {}
    for part in group.wait(group.start_each("rewards", dealt(plan, group.layout)), "rewards", timeout_s):
        score_N |= part
    return [score_N[n] for n in range(responses)]


def sequence_kl(policy: RankGroup, responses: int, timeout_s: float) -> np.ndarray:
    """Return each response's KL to the reference in the last plan (`old_kl`), float64 [N]; 0 without a reference.

    Args:
        policy: the policy's ranks.
        responses: N.
        timeout_s: time limit.
    """
    kl_N = np.zeros(responses)
    for part in policy.call("sequence_kl", timeout_s=timeout_s):
        for n, value in part.items():
            kl_N[n] += value
    return kl_N


def experts_wanted(policy: RankGroup, share: float, timeout_s: float) -> ExpertsWanted | None:
    """Return which routed experts the policy's ranks need; None if none, as for a dense model.

    Args:
        policy: the policy's ranks.
        share: of the responses whose experts are wanted.
        timeout_s: time limit.
    """
    shapes = policy.call("moe_shape", timeout_s=timeout_s) if share else []
    stages = {shape.stage: shape.moe_layers for shape in shapes}
    if not any(stages.values()):
        return None
    return ExpertsWanted([stages[stage] for stage in sorted(stages)], shapes[0].layers, shapes[0].topk, share)


def create_ranks(worker: type[MegatronWorker], config: RunSettings, layout: Layout, places: Sequence[Any], *arguments: Any) -> ActorGroup:
    """Start the processes of one group; `build_ranks` then connects them.

    Args:
        worker: the processes' class.
        config: the run's configuration.
        layout: the group's parallel layout.
        places: a scheduling strategy for each rank, from `reserve_workers`.
        *arguments: further arguments of the class, after (rank, settings).
    """
    actor, gpus, settings = ray.remote(worker), int(config.cluster.gpus), RankSettings.of(config, layout)
    actors = [
        actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=place).remote(rank, settings, *arguments)
        for rank, place in enumerate(places)
    ]
    return ActorGroup("rank", actors)


def build_ranks(groups: Sequence[ActorGroup], start_timeout_s: float, *, blank: bool = False) -> None:
    """Connect the ranks of each group and build their models, all groups at the same time; return when they are ready.

    Notes on the hardware are printed only once. If a rank fails, all are ended, so that their places are free again.

    Args:
        groups: the groups, whose processes exist.
        start_timeout_s: time limit.
        blank: trained models get their weights from a checkpoint, which is loaded next.
    """
    building = []
    try:
        for group in groups:
            [address] = ActorGroup(group.kind, group.actors[:1]).call("listen", timeout_s=start_timeout_s)
            building.append(group.start("build", address, blank))
        notes = [group.wait(calls, "start", start_timeout_s) for group, calls in zip(groups, building, strict=True)]
    except BaseException:
        end(actor for group in groups for actor in group.actors)
        raise
    for note in dict.fromkeys(note for group_notes in notes for note in group_notes if note):
        print(f"megarl: {note}", file=sys.stderr)


def start_ranks(
    worker: type[MegatronWorker], config: RunSettings, layout: Layout, places: Sequence[Any], *arguments: Any, blank: bool = False
) -> ActorGroup:
    """Start one group: `create_ranks` and `build_ranks`.

    Args:
        worker: the processes' class.
        config: the run's configuration.
        layout: the group's parallel layout.
        places: a scheduling strategy for each rank, from `reserve_workers`.
        *arguments: further arguments of the class, after (rank, settings).
        blank: trained models get their weights from a checkpoint, which is loaded next.
    """
    group = create_ranks(worker, config, layout, places, *arguments)
    build_ranks([group], config.cluster.start_timeout_s, blank=blank)
    return group


def reserve_workers(config: RunSettings, kinds: Sequence[ProcessKind]) -> list[list[Any]]:
    """Reserve a place for each process.

    Args:
        config: the run's configuration.
        kinds: the kinds of processes, from `demand`.

    Returns:
        For each kind, the scheduling strategies of its processes.

    Raises:
        NoNodes: the session has no room and cannot grow.
        WorkerLate: the cluster that was joined had no room in time.
        Unfit: another machine does not see the run's files.
    """
    places = reserve(kinds, config.cluster.start_timeout_s, grows=config.cluster.address is not None)
    if config.cluster.address is not None or config.cluster.allocation is not None:
        check_shared(nodes_of([place for own in places for place in own]), *files(config), config.cluster.start_timeout_s)
    return places


def must_move(config: RunSettings, places: Sequence[Any]) -> bool:
    """Whether failed processes cannot start again in these places, since a node is gone. In a Slurm job, first send unfit nodes away."""
    cluster = config.cluster
    if not lost_nodes(places) and cluster.allocation is not None:
        send_away(Allocation.read(cluster.allocation), cluster.gpus, files(config)[0], cluster.start_timeout_s)
    return lost_nodes(places)
