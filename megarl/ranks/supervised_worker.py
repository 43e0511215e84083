"""The ranks of the supervised stages: one trained model, a preference loss's reference, optimizer steps, and held-out measurements.

Axes: T predicted tokens, R rows of local logits or values, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.algorithms import Loss
from megarl.algorithms.objective import Objective
from megarl.batch import Batch, Sample, pack, pack_scored
from megarl.config import OptimizerSettings
from megarl.lazy_torch import Tensor, torch
from megarl.observe.metrics import Max, Mean, Metric, Min, merge
from megarl.ranks.critic import loss_metrics, values
from megarl.ranks.megatron_worker import MegatronWorker, RankSettings
from megarl.ranks.step_plan import split_step

if TYPE_CHECKING:
    from megarl.parallel.checkpoint.state import ModelState
    from megarl.ranks.tower_work import TowerWork

MODEL = "model"  # the model's name in a checkpoint


@dataclass(frozen=True)
class TrainSpec:
    """What the ranks optimise, and how."""

    objective: Objective
    optimizer: OptimizerSettings
    updates: int  # optimizer steps of the whole run; 0: the model is only measured


@dataclass(frozen=True)
class MiniBatch:
    """The sequences of one optimizer step or of one measurement, and their split. Pairs are in the order chosen, rejected, chosen, ..."""

    samples: Sequence[Sample]
    split: Sequence[Sequence[Sequence[int]]]  # [data-parallel rank][micro-batch] -> sequences, as indices into the N axis
    weight_N: np.ndarray  # float32: weight of a loss token of the sequence
    margin_N: np.ndarray  # float32: by how much a chosen response should be better than the rejected one
    taught_N: Sequence[np.ndarray] | None = None  # float32 [loss tokens, 2 K + 1]: what a teacher says of each (`megarl.data.taught`)

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)


def mini_batch(
    objective: Objective,
    samples: Sequence[Sample],
    margin_N: Sequence[float],
    dp: int,
    capacity: int,
    tower: TowerWork | None = None,
    taught_N: Sequence[np.ndarray] | None = None,
) -> MiniBatch:
    """Split samples over ranks and micro-batches, balanced by tokens; pairs stay together.

    Args:
        objective: says whether samples are pairs, how many of their tokens are fed, and the weight of each loss token.
        samples: the samples of one mini-batch, at least one item for each rank; in a pair the chosen response comes first.
        margin_N: for each sample, by how much the chosen response of its pair should be better.
        dp: the number of data-parallel ranks.
        capacity: the largest number of tokens in a micro-batch.
        tower: as of `plan_step`.
        taught_N: as of `MiniBatch`.

    Raises:
        ValueError: a sequence or pair does not fit, there are fewer of them than ranks, or there is no loss token (in a pair: on one side).
    """
    unit = objective.responses
    fed = [len(sample.tokens) - (objective.head == "lm") for sample in samples]  # a last token has no next one to predict
    more = [0 if tower is None else tower.tokens(sample.images) for sample in samples]
    length_U, more_U = ([sum(values[n : n + unit]) for n in range(0, len(fed), unit)] for values in (fed, more))
    [shards] = split_step(length_U, 1, dp, capacity, more_U)
    count_N = torch.tensor([sample.loss_tokens for sample in samples])
    return MiniBatch(
        samples=samples,
        split=[[[unit * u + side for u in units for side in range(unit)] for units in shard] for shard in shards],
        weight_N=objective.weights(count_N).float().numpy(),
        margin_N=np.array(margin_N, dtype=np.float32),
        taught_N=taught_N,
    )


class SupervisedWorker(MegatronWorker):
    """One rank of the trained model: a language model (role "actor"), or a reward model (role "rm").

    Args:
        rank: its rank in the group.
        settings: the group's settings.
        spec: what to optimise, and how.
    """

    def __init__(self, rank: int, settings: RankSettings, spec: TrainSpec) -> None:
        super().__init__(rank, settings)
        self._spec = spec
        self._role = "rm" if spec.objective.head == "value" else "actor"

    def build_models(self) -> None:
        """Build the trained model, and the frozen reference if the loss needs one: of a model with adapters, itself without them."""
        path, lora, spec = self._settings.model.path, self._settings.model.lora, self._spec
        self._trained = self._model(path, spec.objective.head, spec.optimizer if spec.updates else None, spec.updates, lora)
        self._reference = None
        if spec.objective.needs_reference:
            self._reference = self._model(path) if lora is None else self._trained.base

    def train(self, plan: MiniBatch) -> dict[str, Metric]:
        """Take one optimizer step; return the metrics of the tokens that only this rank reports, and of the step."""
        batches = self._batches(plan)
        results, info = self._trained.step(batches, self._loss_fn)
        metrics = merge(results) if self._reports_tokens else {}
        metrics |= self._trained.performance(batches, report=self._reports_tokens)
        if self._rank == 0:
            metrics |= info.metrics(self._role)
        return metrics

    def measure(self, plan: MiniBatch) -> dict[str, Metric]:
        """Compute the loss's metrics on sequences without training on them.

        For demonstrations, also how often the likeliest token is the right one; for reward models, also the highest and lowest score.
        """
        from megarl.parallel import schedule

        predictor = self._trained.predictor_pass()
        results = schedule.run(self._trained.chunks, self._batches(plan), self._look, self._grid, forward_only=True, predictor=predictor)
        return merge([*results, *(predictor.results if predictor is not None else [])]) if self._reports_tokens else {}

    def trained(self) -> dict[str, ModelState]:
        """The one trained model."""
        return {MODEL: self._trained.saved()}

    def save(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory; a reward model in the sequence-classification layout."""
        self._trained.save(directory)

    def _batches(self, plan: MiniBatch) -> list[Batch]:
        """Assemble this data-parallel rank's micro-batches, with the reference's log-probs if the loss needs them."""
        batches = [self._assemble(plan, list(members)) for members in plan.split[self._grid.dp_rank]]
        if self._reference is None:
            return batches
        return self._reference.forward_tokens(batches, "ref_logp", lambda *output: self._logprobs(*output)[0])

    def _assemble(self, plan: MiniBatch, members: list[int]) -> Batch:
        samples = [plan.samples[n] for n in members]
        batch = pack_scored(samples) if self._role == "rm" else pack(samples)
        weight_T, margin_T = (batch.spread(torch.tensor(value_N[members])) for value_N in (plan.weight_N, plan.margin_N))
        batch = batch.with_extra(weight=torch.where(batch.mask_T, weight_T, 0.0), margin=margin_T)
        return batch if plan.taught_N is None else batch.with_extra(taught=_taught(plan.taught_N, members, batch))

    def _loss_fn(self, output_RX: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        loss = self._loss(output_RX, row_T, batch)
        return (loss.loss_T * batch.extra_T["weight"]).sum(), loss_metrics(loss)

    def _look(self, output_RX: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        objective, hits = self._spec.objective, dict[str, Metric]()
        if objective.responses == 1 and objective.head == "lm":
            from megarl.parallel.logprobs import likeliest

            hit_T = likeliest(output_RX, row_T, batch.target_T, self._grid.groups.tp, self._vocabulary)
            hits = {f"{objective.name}/accuracy": Mean(float((hit_T & batch.mask_T).count_nonzero()), float(batch.mask_T.count_nonzero()))}
        elif objective.head == "value" and batch.mask_T.any():
            score_X = values(output_RX, row_T, batch)[batch.mask_T]
            hits = {f"{objective.name}/highest": Max(float(score_X.max())), f"{objective.name}/lowest": Min(float(score_X.min()))}
        total, means = self._loss_fn(output_RX, row_T, batch)
        return total, means | hits

    def _loss(self, output_RX: Tensor, row_T: Tensor, batch: Batch) -> Loss:
        objective = self._spec.objective
        if objective.head == "value":
            return objective.loss(values(output_RX, row_T, batch), batch, self._sum_over)
        if "taught" in batch.extra_T:
            return objective.loss(*self._compared(output_RX, row_T, batch), self._sum_over)
        logp_T, entropy_T = self._logprobs(output_RX, row_T, batch)
        return objective.loss(logp_T, batch.with_extra(entropy=entropy_T.detach()), self._sum_over)

    def _logprobs(self, logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        from megarl.parallel.logprobs import logprob_entropy

        group = self._grid.groups.tp
        return logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, group, self._vocabulary, overwrite=True)  # nothing else reads them

    def _compared(self, logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """The log-probs of the targets, and the batch with its and the teacher's log-probs of the tokens that the teacher names."""
        from megarl.parallel.logprobs import logprob_entropy_buckets

        taught_TC, group = batch.extra_T["taught"], self._grid.groups.tp
        count = taught_TC.shape[1] // 2
        settings = (taught_TC[:, :count].long(), 1.0, group, self._vocabulary)
        logp_T, entropy_T, policy_TB = logprob_entropy_buckets(logits_RV, row_T, batch.target_T, *settings, overwrite=True)
        return logp_T, batch.with_extra(entropy=entropy_T.detach(), policy_buckets=policy_TB, teacher_buckets=taught_TC[:, count:])

    @property
    def _vocabulary(self) -> int:
        return self._trained.description.vocab


def _taught(taught_N: Sequence[np.ndarray], members: Sequence[int], batch: Batch) -> Tensor:
    """What the teacher says at each entry, float32 [T, 2 K + 1]; at masked ones, of which nothing is read, some K different tokens."""
    width = taught_N[0].shape[1]
    taught_TC = torch.zeros(len(batch), width)
    taught_TC[:, : width // 2] = torch.arange(width // 2)
    if members:
        taught_TC[batch.mask_T] = torch.from_numpy(np.concatenate([taught_N[n] for n in members]))
    return taught_TC
