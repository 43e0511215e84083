"""Model ranks as the driver sees them: places, processes, one group of the RL loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from megarl.cluster.actor_group import ActorGroup, end
from megarl.cluster.allocation import Allocation
from megarl.cluster.demand import Role, files
from megarl.cluster.placement import ProcessKind
from megarl.cluster.preflight import send_away
from megarl.cluster.reserve import lost_nodes, reserve
from megarl.cluster.shared_files import check_shared, nodes_of
from megarl.config import Layout, RolloutSettings, RunSettings, SyncSettings
from megarl.observe.metrics import Mean, Metric, Sum, merge
from megarl.workers.assemble import Columns
from megarl.workers.megatron_worker import MegatronWorker
from megarl.workers.plan import ScoringPlan, StepPlan
from megarl.workers.rollout_worker import ExpertsWanted

Running = list[Any]
"""Calls that have been started, to be waited for."""


@dataclass(frozen=True)
class WorkerGroup:
    """One group of model ranks and the models that they hold together. Every call goes to all of them at once."""

    group: ActorGroup
    roles: tuple[Role, ...]
    layout: Layout
    timeout_s: float

    def experts_wanted(self, share: float) -> ExpertsWanted | None:
        """Which routed experts the policy's ranks need, for this share of the responses; None if none, as for a dense model."""
        told = self.group.call("moe", timeout_s=self.timeout_s) if share else []
        stages = {stage: layers for stage, layers, _, _ in told}
        if not any(stages.values()):
            return None
        _, _, layers, topk = told[0]
        return ExpertsWanted([stages[stage] for stage in sorted(stages)], layers, topk, share)

    def forward(self, plan: StepPlan, score: bool) -> Running:
        """Hands the step to the ranks; they compute what their models say of its tokens (`ModelWorker.forward`)."""
        return self.group.start_each("forward", self._dealt(plan), score)

    def rewards(self, plan: ScoringPlan) -> dict[int, float]:
        """The reward model's score of each response of the plan."""
        found: dict[int, float] = {}
        for part in self.group.wait(self.group.start_each("rewards", self._dealt(plan)), "rewards", self.timeout_s):
            found |= part
        return found

    def _dealt(self, plan: StepPlan | ScoringPlan) -> list[Any]:
        """For each rank a reference to its part of the plan."""
        parts = [ray.put(plan.part(dp_rank)) for dp_rank in range(self.layout.dp)]
        return [parts[self.layout.dp_rank(rank)] for rank in range(self.layout.ranks)]

    def columns(self, *names: str) -> Columns:
        """Per-token numbers of the scored plan, as references."""
        return [column for part in self.group.call("columns", names, timeout_s=self.timeout_s) for column in part]

    def take(self, given: Columns, *names: str) -> None:
        """Adds columns of another group to the scored plan."""
        self.group.call("take", given, names, timeout_s=self.timeout_s)

    def sequence_kl(self, responses: int) -> np.ndarray:
        """Each response's KL to the reference in the scored plan (`old_kl`), float64 [N]; 0 without a reference."""
        kl_N = np.zeros(responses)
        for part in self.group.call("sequence_kl", timeout_s=self.timeout_s):
            for n, value in part.items():
                kl_N[n] += value
        return kl_N

    def advantages(self, advantage_N: np.ndarray, kl_coef: float, monte_carlo: bool) -> dict[str, Metric]:
        """Gives every token of the scored plan its advantage, from one number a response.

        Args:
            advantage_N: float32 [N], of `response_advantages`.
            kl_coef: the KL's coefficient in this step.
            monte_carlo: the critic is to learn what came of each token, whatever its lambda.

        Returns:
            What a critic explained of the returns, and how far engine and trainer are apart on whole responses.
        """
        return merge(self.group.call("advantages", advantage_N, kl_coef, monte_carlo, timeout_s=self.timeout_s))

    def update(self, mini_batch: int) -> Running:
        """One optimizer step of the policy on a mini-batch of the scored plan."""
        return self.group.start("update", mini_batch)

    def update_critic(self, mini_batch: int) -> Running:
        """One optimizer step of the critic on a mini-batch of the scored plan."""
        return self.group.start("update_critic", mini_batch)

    def merged(self, running: Running, doing: str) -> dict[str, Metric]:
        """The metrics of calls that were started. A loss is a sum over one call's mini-batch; of several, the mean is shown."""
        metrics, calls = merge(self.group.wait(running, doing, self.timeout_s)), len(running) / len(self.group.actors)
        return {name: Mean(value.total, calls) if isinstance(value, Sum) else value for name, value in metrics.items()}

    def sync(self, engines: ActorGroup, rollout: RolloutSettings, version: int, settings: SyncSettings) -> dict[str, Metric]:
        """Brings the policy's weights into every engine, verified tensor by tensor where `settings.verify`.

        Args:
            engines: their actors.
            rollout: says how many processes of each hold weights, and in which dtype.
            version: of the weights, which samples then carry.
            settings: how they are sent, and the time limit of the whole.

        Raises:
            FingerprintMismatch: an engine holds other bits than were sent.
        """
        told = (engines.actors, rollout.tp, rollout.dtype, version, settings)
        calls = self.group.start("sync", *told)
        return merge(self.group.wait(calls, "sync", settings.timeout_s, {engines.kind: engines.actors}))

    def save(self, role: Role, directory: Path) -> None:
        """Writes a model as a Hugging Face directory."""
        self.group.call("save", role, directory, timeout_s=self.timeout_s)


def create_ranks(worker: type[MegatronWorker], config: RunSettings, layout: Layout, places: Sequence[Any], *arguments: Any) -> ActorGroup:
    """Starts the processes of one group; `build_ranks` makes them meet.

    Args:
        worker: their class.
        config: of the run.
        layout: of the ranks.
        places: a scheduling strategy for each rank, of `reserve_workers`.
        *arguments: for the class, after (rank, config, layout).
    """
    actor, gpus = ray.remote(worker), int(config.cluster.gpus)
    actors = [
        actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=place).remote(rank, config, layout, *arguments)
        for rank, place in enumerate(places)
    ]
    return ActorGroup("rank", actors)


def build_ranks(groups: Sequence[ActorGroup], start_timeout_s: float, *, blank: bool = False) -> None:
    """Lets the ranks of each group meet and build their models, all groups at the same time; returns when they are ready.

    What they note of their hardware is told once. Where one fails, all are ended: their places are free for others.

    Args:
        groups: whose processes are there.
        start_timeout_s: longest time that it takes.
        blank: what is trained gets its weights from a checkpoint, which is loaded next.
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
    for note in dict.fromkeys(note for told in notes for note in told if note):
        print(f"megarl: {note}", file=sys.stderr)


def start_ranks(
    worker: type[MegatronWorker], config: RunSettings, layout: Layout, places: Sequence[Any], *arguments: Any, blank: bool = False
) -> ActorGroup:
    """`create_ranks` and `build_ranks` of one group.

    Args:
        worker: the class of its processes.
        config: of the run.
        layout: of the ranks.
        places: a scheduling strategy for each, of `reserve_workers`.
        *arguments: for the class, after (rank, config, layout).
        blank: weights come from a checkpoint, which is loaded next.
    """
    group = create_ranks(worker, config, layout, places, *arguments)
    build_ranks([group], config.cluster.start_timeout_s, blank=blank)
    return group


def reserve_workers(config: RunSettings, kinds: Sequence[ProcessKind]) -> list[list[Any]]:
    """Reserves a place for each process.

    Args:
        config: of the run.
        kinds: of `demand`.

    Returns:
        For each kind the scheduling strategies of its processes.

    Raises:
        NoNodes: the session has no room, and cannot grow.
        WorkerLate: the cluster that was joined has no room in time.
        Unfit: a machine besides this one does not see the run's files.
    """
    places = reserve(kinds, config.cluster.start_timeout_s, grows=config.cluster.address is not None)
    if config.cluster.address is not None or config.cluster.allocation is not None:
        check_shared(nodes_of([place for own in places for place in own]), *files(config), config.cluster.start_timeout_s)
    return places


def must_move(config: RunSettings, places: Sequence[Any]) -> bool:
    """Whether what has failed cannot start again in these places: a node is gone. In a Slurm job those that are unfit go first."""
    cluster = config.cluster
    if not lost_nodes(places) and cluster.allocation is not None:
        send_away(Allocation.read(cluster.allocation), cluster.gpus, files(config)[0], cluster.start_timeout_s)
    return lost_nodes(places)
