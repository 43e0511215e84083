"""What algorithms and teachers ask of a model rank's step, beside passes of single models: log-probs, choices of tokens, losses.

Axes: T predicted tokens, R rows of local logits, V local vocabulary shard, N responses of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from megarl.algorithms import PolicyAlgorithm
from megarl.algorithms.ops import log_ratio
from megarl.batch import EXPERTS, Batch, concat
from megarl.cluster.process_kinds import Role
from megarl.config import CriticSettings, DistillationSettings, OptimizerSettings, RoutingSettings, Truncation
from megarl.lazy_torch import Tensor, torch
from megarl.models.description import ModelDescription
from megarl.observe.metrics import Metric, Sum
from megarl.ranks.assemble import after_shown, at_response, bucket_gap, computed_here, mismatch, mismatch_of_sequences
from megarl.ranks.critic import loss_metrics
from megarl.ranks.megatron_worker import MegatronWorker
from megarl.ranks.step_plan import StepPlan

if TYPE_CHECKING:
    from megarl.parallel.routing import ExpertsRecorded, RoutingPass
    from megarl.ranks.kept import KeptLogprobs
    from megarl.ranks.model import Model, OutputReader

# The column of per-token numbers that each role computes. With `distillation.top_k` the teacher's has rows: K token ids (exact in float32,
# since vocabularies are smaller than 2^24), their log-probs, and that of all other tokens.
COLUMN = {"policy": "old_logp", "reference": "ref_logp", "teacher": "teacher_logp", "critic": "value"}


@dataclass(frozen=True)
class RLSpec:
    """What the ranks of an RL run optimise, and how."""

    algorithm: PolicyAlgorithm
    optimizer: OptimizerSettings
    updates: int  # optimizer steps of the whole run, for the learning-rate schedule
    temperature: float  # sampling temperature, which the log-probs must match
    critic: CriticSettings | None = None
    critic_updates: int = 0  # optimizer steps of the critic
    critic_micro_batches_joined: int = 1  # micro-batches that the critic joins into one
    distillation: DistillationSettings | None = None
    reward: Path | None = None  # the reward model
    offload: bool = False  # idle models leave the device
    shared_devices: bool = False  # the engines share the devices of the policy's ranks
    drafts: bool = False  # the engines draft with the policy's multi-token prediction layer
    routing: RoutingSettings = RoutingSettings()
    old_logp: Literal["forward", "update", "rollout"] = "forward"  # where the old log-probs come from
    truncation: Truncation | None = None  # log-probs are over the tokens that this keeps; None: over the vocabulary


class StepWorker(MegatronWorker):
    """A model rank with the batches of its step."""

    _spec: RLSpec
    _models: dict[str, Model]  # by role; teachers by the settings that name them
    _kept: KeptLogprobs | None
    _mini_batches: list[list[Batch]]  # of the last plan
    _members: list[list[int]]  # the responses of each of their micro-batches, as indices into the N axis
    _fresh: bool  # the policy has the weights that the step began with
    _kl_coef: float

    def _use(self, role: str) -> Model:
        """Move a model, named as in `_models`, to the device and return it; with `offload`, the other models leave the device."""
        if self._spec.offload:
            for model in self._apart_from(role):
                model.park()
        self._models[role].wake()
        return self._models[role]

    def _apart_from(self, role: str) -> list[Model]:
        """The models of the other roles; the reference of a policy with adapters is the same model."""
        own = self._models.get(role)
        return [model for model in self._models.values() if own is None or model.chunks is not own.chunks]

    @contextmanager
    def _follow(self, role: Role, *, replay: bool, record: ExpertsRecorded = "none") -> Iterator[RoutingPass | None]:
        """Follow the routers of a model of the policy's shape, with the experts of "routed_experts"; None if there is nothing to follow."""
        model = self._models[role]
        if model.topk and (replay or (role == "policy" and self._spec.routing.follows)):
            with model.routing.follow("routed_experts", replay=replay, record=record) as routing:
                yield routing
        else:
            yield None

    @property
    def _reports_sequences(self) -> bool:
        """Whether this is the one rank of its data-parallel replica that reports metrics of whole sequences."""
        return self._reports_tokens and self._grid.cp_rank == 0

    def _completed(self, batch: Batch, *more: str) -> Batch:
        """Complete the models' per-token numbers of the batch, and `more` columns, with those of the other context-parallel ranks."""
        if self._grid.cp_size == 1:
            return batch
        names = [name for name in (*COLUMN.values(), *more) if name in batch.extra_T]
        return batch.with_extra(**{name: self._sum_over(batch.extra_T[name].nan_to_num(0.0)) for name in names})

    def _held(self, value_T: Tensor, batch: Batch) -> Tensor:
        """Keep the values of the entries whose output this rank computes; NaN for entries of other ranks."""
        from megarl.parallel.packing import pack_micro

        if not self._grid.is_last_stage:
            return torch.full_like(value_T, torch.nan)
        if self._grid.cp_size == 1 or not len(batch):
            return value_T
        place = {"cp_rank": self._grid.cp_rank, "cp_size": self._grid.cp_size, "tp": self._grid.layout.tp}
        entry_T = pack_micro(batch, **place, device=torch.device("cpu")).entry_T
        return torch.full_like(value_T, torch.nan).index_copy(0, entry_T, value_T[entry_T])

    def _taught(self, flat: list[Batch], plan: StepPlan) -> list[Batch]:
        """The batches with the teachers' column: each response is scored by its own teacher, after what that teacher reads.

        Args:
            flat: the micro-batches of the step.
            plan: the step's plan.
        """
        if plan.shown_N is None:
            return self._scored_by_teachers(flat, plan.teacher_N)
        read = [after_shown(plan, members) for members in self._members]
        scored = self._scored_by_teachers(read, plan.teacher_N)
        return [batch.with_extra(teacher_logp=self._moved(one, batch)) for one, batch in zip(scored, flat, strict=True)]

    def _moved(self, read: Batch, batch: Batch) -> Tensor:
        """The teacher's column of a micro-batch that it has read after other prompts, at the entries of the policy's own micro-batch.

        Args:
            read: what the teacher has read, with its column, of which this rank has the entries that it has computed.
            batch: the policy's, of the same responses.

        Returns:
            [T] or [T, ...]; NaN at the entries whose output this rank does not compute.
        """
        column_T = read.extra_T["teacher_logp"]
        if not self._grid.is_last_stage or not len(batch):
            return self._held(torch.zeros(len(batch)), batch)
        if self._grid.cp_size > 1:
            column_T = self._sum_over(column_T.nan_to_num(0.0))
        return self._held(at_response(column_T, read, batch), batch)

    def _scored_by_teachers(self, flat: list[Batch], teacher_N: np.ndarray | None) -> list[Batch]:
        """The batches with the teachers' column, of what they have read.

        Args:
            flat: what the teachers read, by micro-batch of the step.
            teacher_N: int64, which teacher scores a response; None: there is one.
        """
        assert self._spec.distillation is not None
        names = list(self._spec.distillation.models) or ["policy"]
        if teacher_N is None:
            return self._use(names[0]).forward_tokens(flat, "teacher_logp", self._teaching(names[0]))
        number_FT = [batch.spread(torch.from_numpy(teacher_N[members])) for members, batch in zip(self._members, flat, strict=True)]
        column_F: list[Tensor | None] = [None] * len(flat)
        for number, name in enumerate(names):
            entry_FT = [(number_T == number).nonzero().squeeze(1) for number_T in number_FT]
            own = [batch.take(entry_T) for batch, entry_T in zip(flat, entry_FT, strict=True)]
            scored = self._use(name).forward_tokens(own, "teacher_logp", self._teaching(name))
            for index, (entry_T, batch) in enumerate(zip(entry_FT, scored, strict=True)):
                given_T = batch.extra_T["teacher_logp"]
                if len(entry_T):
                    held_T = column_F[index]
                    held_T = given_T.new_full((len(flat[index]), *given_T.shape[1:]), torch.nan) if held_T is None else held_T
                    column_F[index] = held_T.index_copy(0, entry_T, given_T)
        return [
            batch.with_extra(teacher_logp=torch.full((len(batch),), torch.nan) if column_T is None else column_T)
            for batch, column_T in zip(flat, column_F, strict=True)
        ]

    def _with_sequence_means(self, mini_batch: int, replay: bool) -> list[Batch]:
        """A mini-batch with the means of the algorithm's `sequence_term` over whole responses, of which some are in several micro-batches.

        Args:
            mini_batch: the number of the mini-batch.
            replay: route as the optimizer step does.
        """
        batches, algorithm = self._mini_batches[mini_batch], self._spec.algorithm
        with self._follow("policy", replay=replay) as routing:
            scored = self._use("policy").forward_tokens(batches, "logp", self._logp("policy"), routing)
        if not self._grid.is_last_stage:
            return batches
        first = sum(map(len, self._mini_batches[:mini_batch]))
        buckets = ("teacher_logp",) if self._buckets else ()
        whole = concat([batch.without(*EXPERTS, *buckets) for batch in scored], self._members[first : first + len(batches)])
        # What this context-parallel rank has of it.
        share = computed_here(replace(whole, extra_T={**whole.extra_T, "old_logp": whole.extra_T["logp"]}))
        own_T = algorithm.sequence_term(
            log_ratio(share.extra_T["logp"], whole.extra_T[algorithm.sequence_from], share), whole.extra_T["advantage"]
        )
        assert own_T is not None
        mean_T = whole.spread(self._sum_over(share.sequence_sum(own_T)) / whole.count_N.clamp(min=1))
        ends = np.cumsum([len(batch) for batch in batches])[:-1].tolist()
        return [batch.with_extra(sequence_mean=own) for batch, own in zip(batches, mean_T.tensor_split(ends), strict=True)]

    def _chosen(self, mini_batch: int, replay: bool) -> list[Tensor]:
        """The tokens of each micro-batch that the algorithm's `selection` chooses at the current weights, bool [T].

        The old log-probs are the current ones in the first update of a step that has just computed them; else the policy scores the
        mini-batch once more. Collective.

        Args:
            mini_batch: the number of the mini-batch.
            replay: route as the optimizer step does.
        """
        batches, algorithm = self._mini_batches[mini_batch], self._spec.algorithm
        if self._fresh and self._spec.old_logp == "forward":
            scored = [batch.with_extra(logp=batch.extra_T["old_logp"]) for batch in batches]
        else:
            with self._follow("policy", replay=replay) as routing:
                scored = self._use("policy").forward_tokens(batches, "logp", self._logp("policy"), routing)
        if not self._grid.is_last_stage:
            return [torch.zeros_like(batch.mask_T) for batch in batches]
        first = sum(map(len, self._mini_batches[:mini_batch]))
        buckets = ("teacher_logp",) if self._buckets else ()
        completed = [self._completed(batch.without(*EXPERTS, *buckets), "logp") for batch in scored]
        whole = concat(completed, self._members[first : first + len(batches)])
        chosen_T = algorithm.selection(whole.extra_T["logp"], whole, self._sum_over_replicas)
        return list(chosen_T.tensor_split(np.cumsum([len(batch) for batch in batches])[:-1].tolist()))

    def _logp(self, role: str) -> OutputReader:
        """Return what computes the log-probs of a model, named as in `_models`, from its logits."""
        return lambda logits_RV, row_T, batch: self._logprobs(role, logits_RV, row_T, batch)[0]

    @property
    def _buckets(self) -> int | None:
        """The number of tokens that the teacher names for each entry; None: it scores the sampled token alone, or there is no teacher."""
        return None if self._spec.distillation is None else self._spec.distillation.top_k

    def _teaching(self, name: str) -> OutputReader:
        """Return what computes a teacher's column from its logits."""
        from megarl.parallel.logprobs import top_buckets

        count, spec = self._buckets, self._spec
        if count is None:
            return self._logp(name)
        among, vocabulary = ModelDescription.read(self._settings.model.path).vocab, self._models[name].description.vocab

        def named(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> Tensor:
            token_TK, lp_TB = top_buckets(logits_RV, row_T, count, among, spec.temperature, self._grid.groups.tp, vocabulary)
            return torch.cat([token_TK.float(), lp_TB], dim=1)

        return named

    def _logprobs(self, role: str, logits_RV: Tensor, row_T: Tensor, batch: Batch, overwrite: bool = False) -> tuple[Tensor, Tensor]:
        from megarl.parallel.logprobs import logprob_entropy

        if self._kept is not None:
            return self._kept.read(role, logits_RV, row_T, batch, overwrite)
        vocabulary = self._models[role].description.vocab
        return logprob_entropy(logits_RV, row_T, batch.target_T, self._spec.temperature, self._grid.groups.tp, vocabulary, overwrite)

    def _compared(self, logits_RV: Tensor, row_T: Tensor, batch: Batch, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The policy's log-probs and entropies, and its and the teacher's log-probs of the buckets, at the entries."""
        from megarl.parallel.logprobs import logprob_entropy_buckets

        vocabulary = self._models["policy"].description.vocab
        given_TC = batch.extra_T["teacher_logp"].reshape(len(batch), 2 * count + 1)  # that of an empty micro-batch may be flat
        token_TK, settings = given_TC[:, :count].long(), (self._spec.temperature, self._grid.groups.tp, vocabulary)
        scored = logprob_entropy_buckets(logits_RV, row_T, batch.target_T, token_TK, *settings, overwrite=True)  # nothing else reads them
        return *scored, given_TC[:, count:]

    def _loss_fn(self, logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        policy_TB = teacher_TB = None
        if self._buckets is None:
            logp_T, entropy_T = self._logprobs("policy", logits_RV, row_T, batch, overwrite=True)  # nothing else reads the logits
        else:
            logp_T, entropy_T, policy_TB, teacher_TB = self._compared(logits_RV, row_T, batch, self._buckets)
        seen = batch.with_extra(old_logp=logp_T.detach())
        loss = self._spec.algorithm.loss(
            logp_T, entropy_T, seen if self._spec.old_logp == "update" else batch, self._sum_over, self._kl_coef
        )
        total = (loss.loss_T * batch.extra_T["weight"]).sum()
        if loss.weighted is not None:
            total = total + loss.weighted
        metrics = {"actor/pg_loss": Sum(float(total.detach())), **loss_metrics(loss)}
        if policy_TB is not None and teacher_TB is not None:
            assert self._spec.distillation is not None
            taught_T = self._spec.distillation.loss(policy_TB, teacher_TB, batch.mask_T)
            total = total + (taught_T * batch.extra_T["weight"]).sum()
            metrics |= bucket_gap(policy_TB.detach(), teacher_TB, batch.mask_T)
        if self._fresh and self._spec.old_logp != "forward":  # the weights are still those that the step began with
            of_sequences = mismatch_of_sequences(seen, self._sum_over)
            metrics |= mismatch(seen) | (of_sequences if self._reports_sequences else {})
        return total, metrics
