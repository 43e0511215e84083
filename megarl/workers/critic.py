"""The critic on one rank: values of what the policy did, and steps towards its returns.

Axes: T predicted tokens, R rows of local values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.algorithms import Loss
from megarl.algorithms.value import explained_variance_sums, value_loss
from megarl.batch import Batch
from megarl.observe.metrics import Explained, Max, Mean, Metric, Sum, merge

if TYPE_CHECKING:
    from megarl.parallel.grid import Grid
    from megarl.workers.model import Model


class Critic:
    """A value model: V of the state before each token."""

    def __init__(self, model: Model, grid: Grid) -> None:
        self._model, self._grid = model, grid

    def fill(self, batches: Sequence[Batch]) -> list[Batch]:
        """The batches with `extra_T["value"]` at the entries that this rank computes, NaN elsewhere."""
        return self._model.fill(batches, "value", _values)

    def step(self, batches: Sequence[Batch], clip: float | None, *, report: bool) -> dict[str, Metric]:
        """One optimizer step on the value loss. Reads `extra_T["return"]`, `["value"]` and `["value_weight"]`."""

        def visit(value_R1: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
            loss = value_loss(_values(value_R1, row_T, batch), batch, clip)
            total = (loss.loss_T * batch.extra_T["value_weight"]).sum()
            return total, loss_metrics(loss, "critic/loss", float(total.detach()))

        results, info = self._model.step(batches, visit)
        metrics = merge(results) if report else {}
        if self._grid.rank == 0:
            metrics |= {"critic/grad_norm": Mean(info.grad_norm, 1.0), "critic/lr": Mean(info.lr, 1.0)}
        return metrics

    def save(self, directory: Path) -> None:
        """Writes the critic in Hugging Face's sequence-classification layout."""
        self._model.save(directory)


def critic_metrics(batch: Batch) -> dict[str, Metric]:
    """How well the values explain the returns of the step, over the loss tokens that this rank computed, and the same by position.

    critic/explained_variance is 1 - Var(R - v) / Var(R). A critic that is biased by position shows in value and advantage by third of
    the response.
    """
    here_T = batch.mask_T & ~batch.extra_T["value"].isnan()
    value_T, return_T = batch.extra_T["value"], batch.extra_T["return"]
    count, goal, goal_square, error, error_square = explained_variance_sums(value_T, return_T, here_T).tolist()
    metrics: dict[str, Metric] = {"critic/explained_variance": Explained(count, goal, goal_square, error, error_square)}
    first_N = batch.length_N - batch.count_N
    third_T = ((batch.position_T - batch.spread(first_N)) * 3) // batch.spread(batch.count_N).clamp(min=1)
    for third, name in enumerate(("early", "middle", "late")):
        part_T = here_T & (third_T == third)
        tokens = float(part_T.count_nonzero())
        metrics[f"critic/value_{name}"] = Mean(float(value_T[part_T].sum(dtype=torch.float64)), tokens)
        metrics[f"critic/advantage_{name}"] = Mean(float(batch.extra_T["advantage"][part_T].sum(dtype=torch.float64)), tokens)
        metrics[f"critic/explained_variance_{name}"] = Explained(*explained_variance_sums(value_T, return_T, part_T).tolist())
    return metrics


def loss_metrics(loss: Loss, name: str, total: float) -> dict[str, Metric]:
    """A loss's own numbers, and its sum under `name`."""
    means: dict[str, Metric] = {key: Mean(float(mean.total), float(mean.weight)) for key, mean in loss.mean.items()}
    return {name: Sum(total), **means, **{key: Max(float(peak)) for key, peak in loss.peak.items()}}


def _values(value_R1: Tensor, row_T: Tensor, batch: Batch) -> Tensor:
    return value_R1[row_T, 0].float()
