"""One model rank of the RL loop: holds its shard of some of the run's models, scores responses, learns, sends weights to the engines.

Axes: N responses of the step, S samples (see `step_plan`).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.algorithms.ppo import ActorCritic
from megarl.batch import EXPERTS, Batch, concat
from megarl.cluster.process_kinds import Role
from megarl.config import SyncSettings
from megarl.lazy_torch import torch
from megarl.observe.metrics import Max, Metric, merge
from megarl.ranks.assemble import (
    Columns,
    assemble,
    columns,
    computed_here,
    corrections,
    mismatch,
    mismatch_of_sequences,
    spread,
    teacher_gap,
    weight_metrics,
    with_columns,
)
from megarl.ranks.critic import Critic, critic_metrics
from megarl.ranks.megatron_worker import RankSettings
from megarl.ranks.reward import RewardModel
from megarl.ranks.step_plan import ScoringPlan, StepPlan
from megarl.ranks.step_worker import COLUMN, RLSpec, StepWorker

if TYPE_CHECKING:
    from megarl.parallel.checkpoint.state import ModelState
    from megarl.parallel.routing import ExpertsRecorded
    from megarl.ranks.kept import KeptLogprobs
    from megarl.ranks.model import Model
    from megarl.ranks.publisher import Publisher
    from megarl.sync.senders import SenderRounds

TRAINED: tuple[Role, ...] = ("policy", "critic")
# Experts that the pass of the old log-probs keeps for the updates, by routing.replay.
RECORD: dict[str, ExpertsRecorded] = {"off": "known", "r2": "all", "r3": "none"}


@dataclass(frozen=True)
class MoeShape:
    """Where the policy has experts, as one rank knows it."""

    stage: int  # the rank's pipeline stage
    moe_layers: list[int]  # the MoE layers of that stage
    layers: int  # all layers of the model
    topk: int  # experts per token


class ModelWorker(StepWorker):
    """One rank of a group that holds some of the models of an RL run.

    Args:
        rank: its rank in the group.
        settings: the group's settings.
        spec: what to optimise, and how.
        roles: the roles of the group's models.
    """

    def __init__(self, rank: int, settings: RankSettings, spec: RLSpec, roles: Sequence[Role]) -> None:
        super().__init__(rank, settings, "" if "policy" in roles else roles[0])
        self._spec, self._roles = spec, tuple(roles)

    def build_models(self) -> None:
        """Build the models of this group's roles."""
        policy, lora, spec = self._settings.model.path, self._settings.model.lora, self._spec
        self._models: dict[str, Model] = {}  # by role; teachers by the settings that name them
        for role in sorted(self._roles, key=lambda role: role != "policy"):
            if role == "policy":
                self._models[role] = self._model(policy, "lm", spec.optimizer, spec.updates, lora)
            elif role == "reference" and lora is not None and "policy" in self._models:
                self._models[role] = self._models["policy"].base
            elif role == "reference":
                self._models[role] = self._model(policy)
            elif role == "teacher":
                assert spec.distillation is not None
                for name, path in spec.distillation.models.items():
                    self._models[name] = self._model(path)
                    self._use(name)
                continue
            elif role == "critic":
                assert spec.critic is not None
                self._models[role] = self._model(
                    spec.critic.path or policy,
                    "value",
                    spec.critic.optimizer,
                    spec.critic_updates,
                    lora and lora.model_copy(update={"init": None}),
                )
            else:
                assert spec.reward is not None
                self._models[role] = self._model(spec.reward, "value")
            self._use(role)
        self._kept: KeptLogprobs | None = None
        if spec.truncation is not None and "policy" in self._roles:
            from megarl.ranks.kept import KeptLogprobs

            hold, vocabulary = spec.old_logp == "forward", self._models["policy"].description.vocab
            self._kept = KeptLogprobs(spec.truncation, spec.temperature, self._grid, vocabulary, hold=hold, reports=self._reports_tokens)
        self._publisher: Publisher | None = None
        self._rounds: SenderRounds | None = None
        self._with_base = set[Any]()  # engines whose base model has been compared (`sync.adapters`)
        self._kl_coef = 0.0

    def forward(self, plan: StepPlan, score: bool = True) -> dict[str, Metric]:
        """Fetch this data-parallel rank's responses and run its models over them: log-probs before the step, and values.

        The mini-batches are kept for `update`.

        Args:
            plan: the step's plan.
            score: run the policy over the responses even if its old log-probs come from elsewhere.

        Returns:
            Metrics of the gap between the policy's and the engine's log-probs, if the policy has run, and of the host memory of the experts
            that are kept.
        """
        split = [mini_batch[self._grid.dp_rank] for mini_batch in plan.split]
        layers = self._engine_layers
        mini_batches = [[assemble(plan, samples, layers) for samples in micro_batches] for micro_batches in split]
        self._samples = [samples for micro_batches in split for samples in micro_batches]
        self._members = [plan.responses(samples) for samples in self._samples]
        self._responses, self._divided, self._part_N = plan.mini_batches, plan.divided, torch.from_numpy(plan.part_N)
        flat, metrics = [batch for mini_batch in mini_batches for batch in mini_batch], dict[str, Metric]()
        if self._kept is not None:
            flat = self._kept.begin(flat)
        elif "reference" in self._models:
            flat = self._score_reference(flat)
        if "teacher" in self._roles:
            flat = self._taught(flat, plan)
        self._scored, self._fresh = score or self._spec.old_logp == "forward", True
        if "policy" in self._models:
            if self._scored:
                flat, metrics = self._score_policy(flat)
            if self._spec.old_logp != "forward":
                flat = [batch.with_extra(old_logp=self._held(batch.extra_T["rollout_logp"], batch)) for batch in flat]
        if self._kept is not None:
            if "reference" in self._models:  # reads what the policy has kept
                flat = self._score_reference(flat)
            metrics |= self._kept.metrics()
        self._keep(flat, mini_batches)
        if "critic" in self._models:
            self._keep(self._critic().forward_tokens(self._mini_batches), mini_batches)
        sizes = [batch.extra_T[name].nbytes for batch in self._flat() for name in EXPERTS if name in batch.extra_T]
        return metrics | ({"routing/held_mb": Max(sum(sizes) / 2**20)} if sizes else {})

    def moe_shape(self) -> MoeShape:
        """Where the policy has experts."""
        policy = self._models["policy"]
        return MoeShape(self._grid.pp_rank, policy.routing.layers, policy.layers, policy.topk)

    def rewards(self, plan: ScoringPlan) -> dict[int, float]:
        """Score the plan's responses with the reward model; return the scores that this rank reports, by response."""
        return RewardModel(self._use("reward"), self._grid).scores(plan)

    def columns(self, names: Sequence[str]) -> Columns:
        """Per-token numbers of the last plan for another group, from the one rank of each data-parallel replica that reports them."""
        if not self._grid.is_last_stage:
            return []
        batches = [self._completed(batch) for batch in self._flat()]
        return columns(batches, self._samples, names) if self._reports_sequences else []

    def take(self, given: Columns, names: Sequence[str]) -> None:
        """Add columns of another group to the last plan, each token's number only on the rank that computed the token's own column."""
        if not self._grid.is_last_stage:
            return
        own = COLUMN[self._roles[0]]
        flat = []
        for batch in with_columns(self._flat(), self._samples, given, names):
            elsewhere_T = batch.extra_T[own].isnan()
            given_T = {name: batch.extra_T[name] for name in names}
            columns = {name: torch.where(elsewhere_T.view(-1, *[1] * (one.dim() - 1)), torch.nan, one) for name, one in given_T.items()}
            flat.append(batch.with_extra(**columns))
        self._keep(flat, self._mini_batches)

    def sequence_kl(self) -> dict[int, float]:
        """Each response's KL to the reference in the last plan (`old_kl`), over the loss tokens that this rank computed and reports.

        Responses that take part in the step and are not trained on have theirs too.
        """
        kl_of = collections.defaultdict[int, float](float)
        if self._spec.algorithm.needs_reference and self._reports_tokens:
            compared = [replace(batch, mask_T=batch.extra_T.get("compared", batch.mask_T)) for batch in self._flat()]
            for members, batch in zip(self._members, map(computed_here, compared), strict=True):
                for n, kl in zip(members, batch.sequence_sum(self._spec.algorithm.old_kl(batch)).tolist(), strict=True):
                    kl_of[n] += kl
        return dict(kl_of)

    def advantages(self, advantage_N: np.ndarray, kl_coef: float, monte_carlo: bool) -> dict[str, Metric]:
        """Compute the advantage of every token of the last plan, from the responses' numbers. Collective over the last stage's ranks.

        Args:
            advantage_N: float32 [N], from `response_advantages`.
            kl_coef: the KL coefficient, here and in the updates that follow.
            monte_carlo: the critic's targets are Monte Carlo returns, whatever its lambda.

        Returns:
            On the ranks that report: metrics of how well the critic's values explain the returns, of the gap between the engine's and the
            trainer's log-probs of whole responses, and of the correction's weights.
        """
        algorithm = self._spec.algorithm
        self._kl_coef = kl_coef
        if not self._grid.is_last_stage:
            return {}
        batches = [spread(batch, members, advantage=advantage_N) for members, batch in zip(self._members, self._flat(), strict=True)]
        buckets = ("teacher_logp",) if self._buckets else ()
        whole = concat([self._completed(batch.without(*EXPERTS, *buckets)) for batch in batches], self._members)
        extra = {"advantage": algorithm.token_advantages(whole, self._sum_over_replicas, kl_coef)}
        if isinstance(algorithm, ActorCritic):
            extra["outcome"] = algorithm.outcomes(whole, kl_coef)
            extra["return"] = extra["outcome"] if monte_carlo else algorithm.returns(whole, kl_coef)
        metrics = [mismatch_of_sequences(whole)] if self._reports_sequences and self._spec.old_logp == "forward" else []
        if self._spec.distillation is not None:
            extra["advantage"] = self._spec.distillation.advantages(extra["advantage"], whole)
            if self._spec.distillation.top_k is None and self._reports_sequences:
                metrics.append(teacher_gap(whole))
        if algorithm.correction is not None:
            members = list(dict.fromkeys(n for chosen in self._members for n in chosen))
            extra |= corrections(algorithm, algorithm.correction, whole, members, self._responses, self._part_N, self._sum_over_replicas)
            metrics += [weight_metrics(extra["correction"], whole)] if self._reports_sequences else []
        ends = np.cumsum([len(batch) for batch in batches])[:-1].tolist()
        parts = {name: value_T.tensor_split(ends) for name, value_T in extra.items()}
        filled = [batch.with_extra(**{name: part[index] for name, part in parts.items()}) for index, batch in enumerate(batches)]
        self._keep(filled, self._mini_batches)
        if algorithm.needs_critic and self._reports_tokens:
            metrics += [critic_metrics(batch) for batch in filled]
        return merge(metrics)

    def update(self, mini_batch: int) -> dict[str, Metric]:
        """Take one optimizer step on a mini-batch of the last plan; return the metrics of the tokens that only this rank reports."""
        batches, replay = self._mini_batches[mini_batch], self._spec.routing.replay != "off"
        if self._divided[mini_batch] and self._spec.algorithm.joins_tokens and self._spec.old_logp != "update":
            batches = self._with_sequence_means(mini_batch, replay)
        if self._spec.algorithm.selects:
            batches = [batch.with_extra(chosen=own_T) for batch, own_T in zip(batches, self._chosen(mini_batch, replay), strict=True)]
        with self._follow("policy", replay=replay) as routing:
            results, info = self._use("policy").step(batches, self._loss_fn, routing)
            metrics = merge(results) if self._reports_tokens else {}
            if routing is not None:
                metrics |= routing.metrics("policy" if self._scored or not self._fresh else "rollout")
        if self._kept is not None:
            metrics |= self._kept.metrics()
        self._fresh = False
        metrics |= self._models["policy"].performance(self._mini_batches[mini_batch], report=self._reports_tokens)
        if self._rank == 0:
            metrics |= info.metrics("actor")
        return metrics

    def update_critic(self, mini_batch: int) -> dict[str, Metric]:
        """Take one optimizer step of the critic on a mini-batch of the last plan."""
        algorithm, critic = self._spec.algorithm, self._spec.critic
        assert isinstance(algorithm, ActorCritic) and critic is not None
        return self._critic().step(self._mini_batches[mini_batch], algorithm.value_clip, critic.loss_coef, report=self._reports_tokens)

    def sync(
        self,
        engines: Sequence[Any],
        workers_per_engine: int,
        dtype: str | None,
        version: int,
        settings: SyncSettings,
        quantization: str | None = None,
    ) -> dict[str, Metric]:
        """Stream the policy's weights into the engines. Every rank takes part in the gather.

        Several ranks send, or rank 0 all of it: see `SyncSettings.senders`.

        Args:
            engines: the engines' actors; they stay connected for later calls, until one fails or they change.
            workers_per_engine: the processes of each engine that hold weights.
            dtype: the dtype of the engines' weights; None: the model's.
            version: the version of the weights, which samples then carry.
            settings: transport, bucket size, time limit, and whether to verify; read when the engines are connected.
            quantization: how the engines' weights are quantised (`rollout.quantization`): the senders do it, from the model's own dtype.

        On rank 0 it returns metrics of what was moved and how long it took. It raises FingerprintMismatch if an engine holds other bits
        (`settings.verify`), and whatever an engine or the transport has raised.
        """
        from megarl.sync.senders import SenderRounds, SenderStopped

        sharing = len(engines) * workers_per_engine if self._spec.shared_devices else 0
        model = self._models["policy"] if sharing else self._use("policy")  # `leave_policy` has made it ready
        if settings.adapters:
            return self._sync_adapters(model, engines, dtype, version, settings)
        senders = settings.senders(self._grid.layout, sharing)
        grid, apart = self._grid, senders > self._grid.layout.pp
        drafts = self._spec.drafts
        stream = model.stream(None if quantization else dtype, by_stage=senders > 1, by_expert_rank=apart, drafts=drafts)
        number = grid.pp_rank * grid.layout.ep + grid.ep_rank if apart else grid.pp_rank
        if number >= senders or not (grid.leads_experts if apart else grid.leads_stage):
            collections.deque(stream, maxlen=0)
            return {}
        if self._rounds is None:
            self._rounds = SenderRounds(grid.store, number, senders, settings.timeout_s)
        try:
            if self._publisher is None or not self._publisher.reaches(engines):
                self._publisher = self._connected(engines, workers_per_engine, settings, self._rounds)
            return self._publisher.publish(stream if quantization is None else model.quantized(stream, dtype, quantization), version)
        except BaseException as error:
            self._publisher = None
            collections.deque(stream, maxlen=0)  # the other ranks gather to the stream's end
            if isinstance(error, SenderStopped):  # the sender that has failed raises
                return {}
            raise

    def _sync_adapters(
        self, model: Model, engines: Sequence[Any], dtype: str | None, version: int, settings: SyncSettings
    ) -> dict[str, Metric]:
        """`sync` of adapters alone; the base model of engines that have not had any yet is compared, too."""
        from megarl.ranks.adapter_publisher import publish_adapter

        known, base = {engine._actor_id for engine in engines}, None
        if settings.verify and not known <= self._with_base:
            base, self._with_base = model.base_prints(dtype), known
        stream = model.adapter_stream(dtype)
        if self._rank:
            collections.deque(stream, maxlen=0)
            return {}
        return publish_adapter(engines, stream, model.adapter_config, base, version, settings)

    def _connected(self, engines: Sequence[Any], workers_per_engine: int, settings: SyncSettings, rounds: SenderRounds) -> Publisher:
        """Connect this rank to the engines, as one of the senders."""
        from megarl.ranks.publisher import FurtherPublisher, WeightPublisher

        kind = FurtherPublisher if rounds.sender else WeightPublisher
        relay = self._grid.rank if self._spec.shared_devices else None  # on GPUs in the ranks' order; else any on its machine
        drafts = self._spec.drafts
        return kind(engines, workers_per_engine, settings, self._host, self._backend.device, rounds, relay=relay, drafts=drafts)

    def save(self, role: Role, directory: Path) -> None:
        """Write a model as a Hugging Face directory; value models in the sequence-classification layout."""
        self._use(role).save(directory)

    def trained(self) -> dict[str, ModelState]:
        """The policy and the critic, as far as this group holds them."""
        return {role: replace(self._models[role].saved(), wake=partial(self._use, role)) for role in self._roles if role in TRAINED}

    def leave_policy(self) -> None:
        """Move everything but the policy's weights off the device: beside them engines have room for weights of their own."""
        for model in self._apart_from("policy"):
            model.park()
        if "policy" in self._models:
            self._models["policy"].park_training()

    def park(self) -> None:
        """Move all models off the device; each returns when it is used."""
        for model in self._models.values():
            model.park()

    def _score_reference(self, flat: list[Batch]) -> list[Batch]:
        """Run the reference over the batches; return them with "ref_logp"."""
        with self._follow("reference", replay=self._spec.routing.reference) as routing:
            return self._use("reference").forward_tokens(flat, "ref_logp", self._logp("reference"), routing)

    def _score_policy(self, flat: list[Batch]) -> tuple[list[Batch], dict[str, Metric]]:
        """Run the policy over the batches; return them with "old_logp", and metrics that compare log-probs and experts with the engine's.

        "routed_experts" then holds the experts that the updates replay or compare with.
        """
        replay, metrics = self._spec.routing.replay, dict[str, Metric]()
        with self._follow("policy", replay=replay == "r3", record=RECORD[replay]) as routing:
            filled = self._use("policy").forward_tokens(flat, "old_logp", self._logp("policy"), routing)
            if self._reports_tokens:
                metrics = merge(mismatch(batch) for batch in filled)
            if routing is not None:
                metrics |= routing.metrics("rollout")
                if replay != "r3":
                    filled = [batch.without("routed_experts") for batch in filled]
                    for index, experts_TLK in routing.recorded.items():
                        filled[index] = filled[index].with_extra(routed_experts=experts_TLK)
        return filled, metrics

    @property
    def _engine_layers(self) -> list[int]:
        """The layers for which this rank's models need the experts that the engine chose."""
        if "policy" in self._models:
            return self._models["policy"].routing.layers
        return self._models["reference"].routing.layers if self._spec.routing.reference and "reference" in self._models else []

    def _critic(self) -> Critic:
        """The critic, on the device."""
        return Critic(self._use("critic"), self._grid, self._spec.critic_micro_batches_joined, replay=self._spec.routing.critic)

    def _flat(self) -> list[Batch]:
        return [batch for mini_batch in self._mini_batches for batch in mini_batch]

    def _keep(self, flat: Sequence[Batch], shape: Sequence[Sequence[Batch]]) -> None:
        """Keep the batches as the step's mini-batches, as many in each as in `shape`."""
        rest = iter(flat)
        self._mini_batches = [[next(rest) for _ in mini_batch] for mini_batch in shape]
