"""The driver's handle to all models of a run, whether they share ranks or not: forward, advantages, update, sync, save.

Axes: N responses of the step.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megarl.checkpoints.steps import CHECKPOINTS
from megarl.cluster.actor_group import ActorGroup, end
from megarl.cluster.process_kinds import Role, assign_roles, demand
from megarl.cluster.reserve import release
from megarl.config import ClusterSettings, CriticSettings, StepSettings, TrainConfig, model_of
from megarl.data.teacher_prompts import Attempt, TeacherPrompts
from megarl.driver.device_turns import Turns
from megarl.driver.engines import Engines, EngineStarter
from megarl.driver.rank_group import (
    RankGroup,
    build_ranks,
    create_ranks,
    dealt,
    experts_wanted,
    merged,
    must_move,
    reserve_workers,
    reward_scores,
    sequence_kl,
)
from megarl.driver.teachers import Teachers
from megarl.driver.trained_groups import TrainedGroups
from megarl.engines.worker import ExpertsWanted
from megarl.observe.metrics import Last, Mean, Metric, merge
from megarl.observe.restarts import Restarts
from megarl.ranks.model_worker import TRAINED, ModelWorker
from megarl.ranks.step_plan import Group, StepPlan, plan_scoring, plan_step, response_advantages
from megarl.ranks.step_worker import COLUMN, RLSpec
from megarl.ranks.tower_work import TowerWork
from megarl.response import Response


@dataclass
class ModelGroups(TrainedGroups):
    """The groups of model ranks. The first holds the policy, and every model that has no ranks of its own (`placement`)."""

    config: TrainConfig
    groups: tuple[RankGroup, ...]
    experts: ExpertsWanted | None  # which of the engine's routed experts the ranks need
    turns: Turns | None = None  # given if the policy's ranks share devices with the engines
    places: Sequence[Sequence[Any]] = ()  # the scheduling strategies of each group's ranks
    teachers: Teachers | None = None  # given if they are on no ranks

    def __post_init__(self) -> None:
        super().__post_init__()
        self._teacher_prompts = TeacherPrompts.of(self.config)

    def build(self, created: Sequence[ActorGroup], *, blank: bool) -> None:
        """Build the models on existing processes, one group for each of `assign_roles`. `blank`: `load` or `restore` comes next."""
        build_ranks(created, self.config.cluster.start_timeout_s, blank=blank)
        if self.turns is not None:
            self.turns.join(created[0])
        roles = assign_roles(self.config)
        self.groups = tuple(RankGroup(group.kind, group.actors, *assigned) for group, assigned in zip(created, roles, strict=True))
        self.experts = experts_wanted(self.policy, self.config.routing.reported, self.timeout_s)

    def of(self, role: Role) -> RankGroup | None:
        """The group that holds the model of a role."""
        return next((group for group in self.groups if role in group.roles), None)

    @property
    def policy(self) -> RankGroup:
        return self.groups[0]

    @property
    def stages(self) -> Sequence[Sequence[int]]:
        """The MoE layers of each pipeline stage whose routed experts the ranks need; empty if they need none."""
        return () if self.experts is None else self.experts.stages

    def rewards(self, responses: Sequence[Response]) -> list[float]:
        """Score the responses with the reward model."""
        group = self.of("reward")
        assert group is not None and len(responses)
        self.take_devices()
        plan = plan_scoring(responses, group.layout.dp, self.config.train.micro_batch_tokens)
        return reward_scores(group, plan, len(responses), self.timeout_s)

    def forward(self, groups: Sequence[Group], *, score: bool = True, sync_follows: bool = True) -> tuple[StepPlan, dict[str, Metric]]:
        """Plan the step and run every model over its tokens, all groups at the same time: old log-probs, reference log-probs, values.

        Args:
            groups: the step's scored responses.
            score: run the policy even if its log-probs are not needed before the update.
            sync_follows: whether the engines get new weights before they answer again.

        Returns:
            The plan, and metrics: of the gap to the engine's log-probs, if the policy has run, and of the memory of the experts that the
            ranks keep.
        """
        self.take_devices(keep_weights=not sync_follows)
        readers, shown_N = [group for group in self.groups if set(group.roles) & COLUMN.keys()], self._shown(groups)
        plans = [
            plan_step(
                self.config,
                groups,
                group.layout.dp,
                capacity(self.config.train, self.config.critic, group.roles),
                self.stages,
                TowerWork.of(self.config.model, group.layout),
                shown_N,
                teaches="teacher" in group.roles,
            )
            for group in readers
        ]
        scoring = [] if self.teachers is None else self.teachers.start(plans[0], groups)
        running = [group.start_each("forward", dealt(plan, group.layout), score) for group, plan in zip(readers, plans, strict=True)]
        metrics = [merged(group, calls, "forward", self.timeout_s) for group, calls in zip(readers, running, strict=True)]
        for group in readers[1:]:
            self._pass_columns([COLUMN[role] for role in group.roles if role in COLUMN], group, self.policy)
        if self.teachers is not None:
            self.policy.call("take", self.teachers.wait(scoring), [COLUMN["teacher"]], timeout_s=self.timeout_s)
        if shown_N is not None:
            metrics.append({"distillation/shown": Mean(float(sum(shown is not None for shown in shown_N)), float(len(shown_N)))})
        return plans[0], merge(metrics)

    def _shown(self, groups: Sequence[Group]) -> list[np.ndarray | None] | None:
        """What the teacher reads in the place of each response's prompt [N], with `distillation.prompt`."""
        if self._teacher_prompts is None:
            return None
        shown_N = list[np.ndarray | None]()
        for group in groups:
            pairs = zip(group.responses, group.scores, strict=True)
            shown_N += self._teacher_prompts.made(
                group.prompt, [Attempt(response.text, score.task, score.feedback) for response, score in pairs]
            )
        return shown_N

    def _pass_columns(self, names: Sequence[str], source: RankGroup, target: RankGroup) -> None:
        """Add columns of per-token numbers of one group to the last plan of another."""
        columns = [column for part in source.call("columns", names, timeout_s=self.timeout_s) for column in part]
        target.call("take", columns, names, timeout_s=self.timeout_s)

    def advantages(
        self, plan: StepPlan, greedy: Sequence[float | None] | None, kl_coef: float, *, monte_carlo: bool = False
    ) -> tuple[np.ndarray, dict[str, Metric]]:
        """Compute the advantage of every token.

        Args:
            plan: the plan that `forward` returned.
            greedy: the reward of the greedy response to each prompt, if the algorithm needs it.
            kl_coef: the KL coefficient in this step.
            monte_carlo: the critic's targets are Monte Carlo returns (value pretraining), whatever its lambda.

        Returns:
            Each response's KL to the reference, float64 [N] (0 without a reference), and the metrics of `ModelWorker.advantages`.
        """
        kl_N = sequence_kl(self.policy, len(plan.payload_N), self.timeout_s)
        advantage_N = response_advantages(self.config.algorithm, plan, greedy, kl_N, kl_coef)
        metrics = merge(self.policy.call("advantages", advantage_N, kl_coef, monte_carlo, timeout_s=self.timeout_s))
        critic = self.of("critic")
        if critic is not None and critic is not self.policy:
            self._pass_columns(["return"], self.policy, critic)
        return kl_N, metrics

    def update(self, plan: StepPlan, *, policy: bool = True) -> dict[str, Metric]:
        """Take the optimizer steps of the critic and, if `policy`, of the policy; at the same time if they share no ranks."""
        metrics, begun = dict[str, Metric](), time.perf_counter()
        group, settings = self.of("critic"), self.config.critic
        critic_calls = []
        if group is not None and settings is not None:
            critic_calls = [call for _ in range(settings.epochs) for part in plan.trained for call in group.start("update_critic", part)]
        epochs = self.config.train.epochs if policy else 0
        policy_calls = [call for _ in range(epochs) for part in plan.trained for call in self.policy.start("update", part)]
        if group is not None and critic_calls:
            metrics |= merged(group, critic_calls, "update the critic", self.timeout_s)
            metrics["timing_s/update_critic"] = Last(time.perf_counter() - begun)
        if policy_calls:
            metrics |= merged(self.policy, policy_calls, "update", self.timeout_s)
        return metrics

    def sync(self, engines: Engines, version: int) -> dict[str, Metric]:
        """Bring the policy's weights into every engine; engines that are replaced later get them from here, too.

        FingerprintMismatch if an engine holds other bits than were sent (`sync.verify`).
        """
        settings, rollout = self.config.sync, engines.settings

        def work() -> dict[str, Metric]:
            if self.turns is not None:
                self.turns.wake_weights()
            actors = engines.group.actors
            calls = self.policy.start("sync", actors, rollout.devices, rollout.dtype, version, settings, rollout.quantization)
            return merge(self.policy.wait(calls, "sync", settings.timeout_s, {engines.group.kind: actors}))

        metrics = engines.keeping("sync", work, refill=False)
        engines.refill = lambda: self.sync(engines, version)
        engines.starting.clear()
        return metrics

    def restart(self, engines: Engines, beginning: bool) -> bool:
        """End all ranks and start them again.

        If a node is gone, ranks and engines get new places, on nodes that are free now.

        Args:
            engines: the engines, which keep running; those that are lost are started again, too.
            beginning: the models begin again as at the start of the run, and so do engines that began with `model.base`. If false, `load`
                or `restore` comes next.

        Returns:
            Whether a node was gone.
        """
        end(actor for group in self.groups for actor in group.actors)
        engines.refill = lambda: None
        if self.turns is not None:
            self.turns.join(None)
        engine_places, teacher_places = engines.places, [] if self.teachers is None else self.teachers.places
        places = [*chain(*self.places), *teacher_places, *engine_places]
        moved = must_move(self.config, places)
        if moved:
            release(places)
            self.places, teacher_places, engine_places = places_of(self.config)
        created = create_groups(self.config, self.places)
        if self.teachers is not None:
            self.teachers.places = teacher_places
            self.teachers.begin()
        try:
            if moved or (beginning and self.config.model.base is not None):
                share_devices(self.config.cluster, created, engines)
                opening = engines.start_again(engine_places)
            else:
                opening = engines.start_lost()
            if self.turns is not None:
                engines.ready(opening)
                self.turns.admit()
                self.turns.to_ranks(keep_weights=False)
            self.build(created, blank=not beginning)
        except BaseException:
            end(actor for group in created for actor in group.actors)
            raise
        engines.ready(opening)
        if self.teachers is not None:
            self.teachers.ready()
        return moved

    @property
    def folders(self) -> dict[str, str]:
        """The folder of the checkpoints of each trained model: a model with ranks of its own has a folder of its own."""
        return {
            role: CHECKPOINTS if group is self.policy else f"{CHECKPOINTS}-{role}"
            for group in self.groups
            for role in group.roles
            if role in TRAINED
        }

    def take_devices(self, *, keep_weights: bool = True) -> None:
        if self.turns is not None:
            self.turns.to_ranks(keep_weights=keep_weights)

    @property
    def trainers(self) -> dict[str, RankGroup]:
        return {group.roles[0]: group for group in self.groups if any(role in TRAINED for role in group.roles)}

    def save(self, role: Role, directory: Path) -> None:
        """Write the model of a role as a Hugging Face directory."""
        group = self.of(role)
        assert group is not None
        self.take_devices()
        group.call("save", role, directory, timeout_s=self.timeout_s)


def start(
    config: TrainConfig, starting: Callable[[str], AbstractContextManager[None]], restarts: Restarts | None = None, *, blank: bool = False
) -> tuple[ModelGroups, Engines]:
    """Start ranks and engines, all at the same time, except that those that share devices start one after the other.

    Args:
        config: the run's configuration. The engines begin with `model.base` if there is one.
        starting: a context manager, entered with the name of what is being waited for.
        restarts: limits how often engines that fail later are replaced.
        blank: a checkpoint is loaded next.
    """
    with starting("model ranks"):
        rank_places, teacher_places, engine_places = places_of(config)
        starter = EngineStarter(config, config.rollout, engine_places, config.model.base or config.model.path)
        engines = Engines.create(starter, restarts)
        created = create_groups(config, rank_places)
        teachers = Teachers(config, teacher_places) if config.taught_apart else None
        if teachers is not None:
            teachers.begin()
        share_devices(config.cluster, created, engines)
        opening = engines.open()
        if engines.turns is not None:
            engines.group.wait(opening, "start", config.cluster.start_timeout_s)
            engines.turns.to_ranks(keep_weights=not starter.blank)
        models = build_groups(config, created, engines.turns, blank=blank)
        models.places, models.teachers = rank_places, teachers
    with starting("engines"):
        engines.group.wait(opening, "start", config.cluster.start_timeout_s)
    if teachers is not None:
        with starting("teachers"):
            teachers.ready()
    return models, engines


def share_devices(cluster: ClusterSettings, created: Sequence[ActorGroup], engines: Engines) -> None:
    """If devices are shared, tell the engines which GPUs the policy's ranks have, before they start.

    Args:
        cluster: the section `cluster`.
        created: the groups of ranks, the policy's first.
        engines: the engines that are about to start.
    """
    if engines.turns is not None and engines.starter is not None and cluster.gpus:
        devices = created[0].call("devices", timeout_s=cluster.start_timeout_s)
        engines.starter.devices = [gpu for own in devices for gpu in own]


def create_groups(config: TrainConfig, places: Sequence[Sequence[Any]]) -> list[ActorGroup]:
    """Start the processes of each group of `assign_roles`."""
    return [
        create_ranks(ModelWorker, config, layout, own, rl_spec(config, roles), roles)
        for (roles, layout), own in zip(assign_roles(config), places, strict=True)
    ]


def places_of(config: TrainConfig) -> tuple[Sequence[Sequence[Any]], Sequence[Any], Sequence[Any]]:
    """Reserve the places of each group of ranks, of the teachers' processes, and of the engines' members.

    A member that shares GPUs has the place of its first rank.
    """
    places, groups = reserve_workers(config, demand(config)), len(assign_roles(config))
    if config.placement.engines == "shared" and config.cluster.gpus:
        engines = places[0][: config.rollout.replicas * config.rollout.devices : config.rollout.tp]
    else:
        engines = places.pop()
    return places[:groups], [*chain(*places[groups:])], engines


def build_groups(config: TrainConfig, created: Sequence[ActorGroup], turns: Turns | None = None, *, blank: bool = False) -> ModelGroups:
    """Build the models on existing processes.

    Args:
        config: the run's configuration.
        created: a group for each of `assign_roles`.
        turns: given if ranks and engines share devices.
        blank: `load` or `restore` comes next.
    """
    models = ModelGroups(config, (), None, turns)
    models.build(created, blank=blank)
    return models


def capacity(train: StepSettings, critic: CriticSettings | None, roles: Sequence[Role]) -> int:
    """The largest number of tokens in a micro-batch on the ranks that hold the models of these roles.

    Args:
        train: the section `train`.
        critic: the section `critic`, if there is one.
        roles: the roles of the models on these ranks.
    """
    own = critic.micro_batch_tokens if critic is not None and "policy" not in roles and "critic" in roles else None
    return own or train.micro_batch_tokens


def rl_spec(config: TrainConfig, roles: Sequence[Role]) -> RLSpec:
    """The training settings for the ranks that hold the models of these roles."""
    train, critic, judge = config.train, config.critic, model_of(config.reward.source)
    critic_updates = 0 if critic is None else critic.epochs * train.mini_batches * config.total_steps
    wished = None if critic is None else critic.micro_batch_tokens
    return RLSpec(
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        updates=train.steps * train.mini_batches * train.epochs,
        temperature=config.rollout.temperature,
        critic=critic,
        distillation=config.distillation,
        critic_updates=critic_updates,
        critic_micro_batches_joined=max(1, (wished or 0) // capacity(train, critic, roles)),
        reward=None if judge is None else judge[1].path,
        old_logp=config.old_logp,
        truncation=config.rollout.truncation if train.logp_over == "kept" else None,
        offload=config.placement.offload,
        shared_devices=config.placement.engines == "shared",
        drafts=config.rollout.speculative is not None,
        routing=config.routing,
    )
