"""One model rank as a Ray actor: holds its shard of the policy (and of the frozen reference), scores responses, learns, gives weights away.

Axes: T predicted tokens, R rows of local logits, V local vocabulary shard.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
import torch
from torch import Tensor

from megarl.algorithms import Loss, PolicyAlgorithm
from megarl.algorithms.ops import SumOver, sequence_kl
from megarl.algorithms.ppo import ActorCritic
from megarl.batch import Batch, concat, pack
from megarl.config import CriticSettings, Layout, OptimizerSettings, RunSettings, SyncSettings
from megarl.observe.metrics import Max, Mean, Metric, Std, merge
from megarl.workers.critic import Critic, critic_metrics, loss_metrics
from megarl.workers.plan import StepPlan
from megarl.workers.rank import Rank

if TYPE_CHECKING:
    from megarl.workers.push import Pusher


class LossFunction(Protocol):
    """What a rank needs of an algorithm."""

    @property
    def needs_reference(self) -> bool: ...

    def loss(self, logp_T: Tensor, entropy_T: Tensor, batch: Batch, sum_over: SumOver, kl_coef: float) -> Loss: ...


@dataclass(frozen=True)
class Objective:
    """What the ranks optimise, and how."""

    algorithm: LossFunction
    optimizer: OptimizerSettings
    updates: int  # optimizer steps of the whole run, for the learning-rate schedule
    temperature: float  # of the sampling that the log-probs must match
    critic: CriticSettings | None = None
    critic_updates: int = 0  # optimizer steps of the critic


class ModelWorker(Rank):
    """The policy on one rank of the grid."""

    def __init__(self, rank: int, config: RunSettings, layout: Layout, objective: Objective) -> None:
        super().__init__(rank, config, layout)
        self._objective = objective

    def build_models(self) -> None:
        """The policy, the reference and the critic, as far as the objective asks for them."""
        config, objective = self._config, self._objective
        self._policy = self._model(config.model.path, optimizer=objective.optimizer, updates=objective.updates)
        self._reference = self._model(config.model.path) if objective.algorithm.needs_reference else None
        self._critic: Critic | None = None
        if objective.critic is not None:
            path = objective.critic.path or config.model.path
            self._critic = Critic(self._model(path, "value", objective.critic.optimizer, objective.critic_updates), self._grid)
        self._pusher: Pusher | None = None
        self._kl_coef = 0.0

    def score(self, plan: StepPlan) -> dict[str, Metric]:
        """Fetches this data-parallel rank's responses and computes the log-probs of the policy that the step starts from.

        Keeps the mini-batches for `update`. Returns what the trainer's log-probs say about the engine's.
        """
        from megarl.parallel.routing import RouterWatch

        split = [mini_batch[self._grid.dp_rank] for mini_batch in plan.split]
        mini_batches = [[_assemble(plan, members) for members in micro_batches] for micro_batches in split]
        self._members = [members for micro_batches in split for members in micro_batches]
        flat = [batch for mini_batch in mini_batches for batch in mini_batch]
        routing: list[dict[str, Metric]] = []
        watch = RouterWatch(self._policy.chunks, self._grid)

        def logp(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> Tensor:
            return self._logprobs(logits_RV, row_T, batch)[0]

        def watched(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> Tensor:
            if "routes" in batch.extra_T:
                routing.append({"routing/changed_frac": Mean(*watch.changed(row_T, batch.extra_T["routes"]))})
            return logp(logits_RV, row_T, batch)

        flat = [batch.without("routes") for batch in self._policy.fill(flat, "old_logp", watched)]
        watch.close()
        if self._reference is not None:
            flat = self._reference.fill(flat, "ref_logp", logp)
        if self._critic is not None:
            flat = self._critic.fill(flat)
        self._keep(flat, mini_batches)
        return merge([*routing, *(_mismatch(batch) for batch in flat)]) if self._reports else {}

    def sequence_kl(self) -> dict[int, float]:
        """sum_t (old_t - ref_t) of each response of the last plan, over the loss tokens that this rank computed and reports."""
        found: dict[int, float] = {}
        if self._reference is not None and self._reports:
            for members, batch in zip(self._members, self._flat(), strict=True):
                found |= dict(zip(members, sequence_kl(_known(batch)).tolist(), strict=True))
        return found

    def advantages(self, advantage_N: np.ndarray, kl_coef: float) -> dict[str, Metric]:
        """Gives every token of the scored plan its advantage, from the responses' numbers. Collective over the last stage's ranks.

        Returns how well the critic's values explain the returns, where there is a critic.
        """
        algorithm = self._objective.algorithm
        assert isinstance(algorithm, PolicyAlgorithm)
        self._kl_coef = kl_coef
        if not self._grid.is_last_stage:
            return {}
        batches = [_spread(batch, members, advantage=advantage_N) for members, batch in zip(self._members, self._flat(), strict=True)]
        whole = concat([self._completed(batch) for batch in batches])
        extra = {"advantage": algorithm.token_advantages(whole, self._sum_over_replicas, kl_coef)}
        if self._critic is not None:
            assert isinstance(algorithm, ActorCritic)
            extra["return"] = algorithm.returns(whole, kl_coef)
        ends = np.cumsum([len(batch) for batch in batches])[:-1].tolist()
        parts = {name: value_T.tensor_split(ends) for name, value_T in extra.items()}
        filled = [batch.with_extra(**{name: part[index] for name, part in parts.items()}) for index, batch in enumerate(batches)]
        self._keep(filled, self._mini_batches)
        return merge([critic_metrics(batch) for batch in filled]) if self._critic is not None and self._reports else {}

    def update(self, mini_batch: int) -> dict[str, Metric]:
        """One optimizer step on a mini-batch of the last plan; returns the metrics of the tokens that this rank alone reports."""
        return self._step(self._mini_batches[mini_batch])

    def update_critic(self, mini_batch: int) -> dict[str, Metric]:
        """One optimizer step of the critic on a mini-batch of the last plan."""
        assert self._critic is not None and isinstance(self._objective.algorithm, ActorCritic)
        return self._critic.step(self._mini_batches[mini_batch], self._objective.algorithm.value_clip, report=self._reports)

    def train(self, plan: StepPlan) -> dict[str, Metric]:
        """One optimizer step on a plan of one mini-batch, without scoring it first (supervised stages)."""
        [mini_batch] = plan.split
        return self._step([_assemble(plan, members) for members in mini_batch[self._grid.dp_rank]])

    def sync(self, engines: Sequence[Any], workers_per_engine: int, version: int, settings: SyncSettings) -> dict[str, Metric]:
        """Streams the policy's weights into the engines. Every rank takes part in the gather; rank 0 sends."""
        from megarl.workers.push import Pusher

        stream = self._policy.stream()
        if self._rank != 0:
            collections.deque(stream, maxlen=0)
            return {}
        if self._pusher is None:
            self._pusher = Pusher(engines, workers_per_engine, settings, self._host, self._backend.device)
        return self._pusher.push(stream, version)

    def save(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face directory, and the critic beside it (<directory>-critic), where there is one."""
        self._policy.save(directory)
        if self._critic is not None:
            self._critic.save(directory.with_name(f"{directory.name}-critic"))

    def _flat(self) -> list[Batch]:
        return [batch for mini_batch in self._mini_batches for batch in mini_batch]

    def _keep(self, flat: Sequence[Batch], shape: Sequence[Sequence[Batch]]) -> None:
        """The batches as the step's mini-batches, of the given lengths."""
        rest = iter(flat)
        self._mini_batches = [[next(rest) for _ in mini_batch] for mini_batch in shape]

    def _completed(self, batch: Batch) -> Batch:
        """The batch with the log-probs of its entries on all context-parallel ranks."""
        if self._grid.cp_size == 1:
            return batch
        names = [name for name in ("old_logp", "ref_logp", "value") if name in batch.extra_T]
        return batch.with_extra(**{name: self._sum_over(batch.extra_T[name].nan_to_num(0.0)) for name in names})

    def _logprobs(self, logits_RV: Tensor, row_T: Tensor, batch: Batch, overwrite: bool = False) -> tuple[Tensor, Tensor]:
        from megarl.parallel.logprobs import logprob_entropy

        vocabulary = int(self._policy.hf["vocab_size"])
        group, temperature = self._grid.groups.tp, self._objective.temperature
        return logprob_entropy(logits_RV, row_T, batch.target_T, temperature, group, vocabulary, overwrite)

    def _step(self, batches: list[Batch]) -> dict[str, Metric]:
        results, info = self._policy.step(batches, self._visit)
        metrics = merge(results) if self._reports else {}
        if self._rank == 0:
            metrics |= {"actor/grad_norm": Mean(info.grad_norm, 1.0), "actor/lr": Mean(info.lr, 1.0)}
        return metrics

    def _visit(self, logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        logp_T, entropy_T = self._logprobs(logits_RV, row_T, batch, overwrite=True)  # nothing else reads the logits
        loss = self._objective.algorithm.loss(logp_T, entropy_T, batch, self._sum_over, self._kl_coef)
        total = (loss.loss_T * batch.extra_T["weight"]).sum()
        if loss.weighted is not None:
            total = total + loss.weighted
        return total, loss_metrics(loss, "actor/pg_loss", float(total.detach()))


def _assemble(plan: StepPlan, members: Sequence[int]) -> Batch:
    """The given responses of the plan as one batch with their rewards and weights; those that are not kept have no loss token."""
    payloads = sorted({plan.place_N[n][0] for n in members})
    samples = dict(zip(payloads, ray.get([plan.payloads[payload] for payload in payloads]), strict=True))
    batch = pack([samples[plan.place_N[n][0]][plan.place_N[n][1]] for n in members])
    keep_N = torch.tensor(plan.keep_N[list(members)], dtype=torch.bool)
    batch = replace(batch, mask_T=batch.mask_T & batch.spread(keep_N), count_N=batch.count_N * keep_N)
    batch = _spread(batch, members, reward=plan.reward_N)
    given = {"weight": plan.weight_N, "positive_weight": plan.positive_weight_N, "value_weight": plan.value_weight_N}
    weights = {name: weight_N for name, weight_N in given.items() if weight_N is not None}
    weighted = _spread(batch, members, **weights)
    return batch.with_extra(**{name: torch.where(batch.mask_T, weighted.extra_T[name], 0.0) for name in weights})


def _spread(batch: Batch, members: Sequence[int], **values_N: np.ndarray) -> Batch:
    """The batch with each of the plan's per-response values at the entries of its responses."""
    return batch.with_extra(**{name: batch.spread(torch.tensor(value[list(members)])) for name, value in values_N.items()})


def _known(batch: Batch) -> Batch:
    """The batch with the loss tokens alone whose log-probs this rank computed."""
    return replace(batch, mask_T=batch.mask_T & ~batch.extra_T["old_logp"].isnan())


def _mismatch(batch: Batch) -> dict[str, Metric]:
    """How far the engine's log-probs are from the trainer's, over the loss tokens that this rank computed.

    rollout_corr: d = old - rollout; kl is the mean of -d, k3_kl the mean of exp(d) - 1 - d, ratio_gt_2 the share of tokens with |d| > ln 2.
    """
    here_T = _known(batch).mask_T
    old, rollout = batch.extra_T["old_logp"][here_T].double(), batch.extra_T["rollout_logp"][here_T].double()
    if not len(old):
        return {}
    tokens, d, gap = float(len(old)), old - rollout, (old.exp() - rollout.exp()).abs()

    def mean(value: Tensor) -> Metric:
        return Mean(float(value.sum()), tokens)

    return {
        "training/rollout_probs_diff_mean": mean(gap),
        "training/rollout_probs_diff_max": Max(float(gap.max())),
        "training/rollout_probs_diff_std": Std(float(gap.sum()), float(gap.square().sum()), tokens),
        "training/logprob_gap_mean": mean(d.abs()),
        "training/logprob_gap_max": Max(float(d.abs().max())),
        "rollout_corr/kl": mean(-d),
        "rollout_corr/k3_kl": mean(torch.expm1(d) - d),
        "rollout_corr/ratio_gt_2": mean((d.abs() > 0.6931471805599453).double()),
        "rollout_corr/rollout_is_mean": mean(d.exp()),
    }
