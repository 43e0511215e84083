"""The critic on one rank: values of the policy's tokens, and optimizer steps towards their returns.

Axes: T predicted tokens, R rows of local values.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from megarl.algorithms import Loss
from megarl.algorithms.value import explained_variance_sums, value_loss
from megarl.batch import Batch, concat
from megarl.lazy_torch import Tensor, torch
from megarl.observe.metrics import Explained, GroupBias, Max, Mean, Metric, Sum, merge

if TYPE_CHECKING:
    from megarl.parallel.grid import Grid
    from megarl.parallel.routing import ExpertsRecorded, RoutingPass
    from megarl.ranks.model import Model


class Critic:
    """A value model: V of the state before each token.

    Args:
        model: a model with a scalar head.
        grid: this rank's grid.
        together: the number of micro-batches to join into one.
        replay: in optimizer steps, route each token to the experts that computed its value.
    """

    def __init__(self, model: Model, grid: Grid, together: int, *, replay: bool) -> None:
        self._model, self._grid, self._together, self._replay = model, grid, together, replay and model.topk > 0

    def forward_tokens(self, mini_batches: Sequence[Sequence[Batch]]) -> list[Batch]:
        """Add `extra_T["value"]` to all batches, NaN at entries that other ranks compute; with `replay`, also `extra_T["critic_experts"]`.

        Batches are joined within their mini-batch, as in the steps, so that the same rank routes a token both times.
        """
        batches = [batch for mini_batch in mini_batches for batch in mini_batch]
        joined, lengths = [one for mini_batch in mini_batches for one in self._joined(mini_batch)], [len(batch) for batch in batches]
        with self._follow(record="all") as routing:
            columns = {"value": torch.cat([one.extra_T["value"] for one in self._model.forward_tokens(joined, "value", values, routing)])}
        if routing is not None and routing.recorded:
            columns["critic_experts"] = torch.cat([routing.recorded[index] for index in range(len(joined))])
        parts = {name: value_T.split(lengths) for name, value_T in columns.items()}
        return [batch.with_extra(**{name: part[index] for name, part in parts.items()}) for index, batch in enumerate(batches)]

    def step(self, batches: Sequence[Batch], clip: float | None, coef: float, *, report: bool) -> dict[str, Metric]:
        """Take one optimizer step on the value loss. Collective.

        Args:
            batches: this data-parallel rank's part of a mini-batch. Reads `extra_T["return"]`, `["value"]` and `["value_weight"]`.
            clip: as in `value_loss`.
            coef: as in `value_loss`.
            report: whether this rank reports the metrics of its tokens.

        Returns:
            The loss's metrics if `report`, and those of the optimizer on rank 0.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are then as before.
        """

        def loss_fn(value_R1: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
            loss = value_loss(values(value_R1, row_T, batch), batch, clip, coef)
            total = (loss.loss_T * batch.extra_T["value_weight"]).sum()
            return total, {"critic/loss": Sum(float(total.detach())), **loss_metrics(loss)}

        with self._follow(replay=True) as routing:
            results, info = self._model.step(self._joined(batches), loss_fn, routing)
        metrics = merge(results) if report else {}
        if self._grid.rank == 0:
            metrics |= info.metrics("critic")
        return metrics

    def _joined(self, batches: Sequence[Batch]) -> list[Batch]:
        own = [batch.without("routed_experts") for batch in batches]
        return [concat(own[first : first + self._together]) for first in range(0, len(own), self._together)]

    def _follow(self, *, replay: bool = False, record: ExpertsRecorded = "none") -> AbstractContextManager[RoutingPass | None]:
        return self._model.routing.follow("critic_experts", replay=replay, record=record) if self._replay else nullcontext()


def critic_metrics(batch: Batch) -> dict[str, Metric]:
    """Metrics of how well the values explain the step's returns, over the loss tokens that this rank computed, in total and by position.

    critic/explained_variance is 1 - Var(R - v) / Var(R), also over the early, middle and late third of each response.
    critic_by_position/{value,return,advantage}_from_p are means over the p-th to the (2p - 1)-th token of the responses, p = 1, 2, 4, 8...
    The return at a position is the Monte Carlo return, `extra_T["outcome"]`, whatever lambda the critic learns from: targets with a small
    lambda follow the critic's own values, with their bias. Positions count from the response's start, not as shares of its length, which
    the critic cannot know before the end; so an unbiased critic has E[value] = E[return] at each of them. critic/position_bias says how far
    the critic is from that (`observe.metrics.GroupBias`). Of several contexts each begins with the response's opening: positions and thirds
    are those in a token's own context, which is what the critic reads; `batch` then has all entries of its contexts.
    """
    here_T = batch.mask_T & ~batch.extra_T["value"].isnan()
    value_T, return_T = batch.extra_T["value"], batch.extra_T["return"]
    explained: dict[str, Metric] = {"critic/explained_variance": Explained(*explained_variance_sums(value_T, return_T, here_T).tolist())}
    place_T, length_T = batch.position_T, batch.spread(batch.length_N)
    if batch.begin_T is not None:
        context_T, count_C = batch.contexts()
        place_T, length_T = place_T - batch.begin_T, count_C[context_T]
    place_T, length_T = ((value_T - batch.spread(batch.start_N)).clamp(min=0) for value_T in (place_T, length_T))  # in the response, from 0
    third_T = (place_T * 3) // length_T.clamp(min=1)
    for third, name in enumerate(("early", "middle", "late")):
        sums = explained_variance_sums(value_T, return_T, here_T & (third_T == third))
        explained[f"critic/explained_variance_{name}"] = Explained(*sums.tolist())
    shown = (batch.extra_T[name][here_T] for name in ("value", "outcome", "advantage"))
    return explained | _by_position(place_T[here_T] + 1, *shown)


def _by_position(position_T: Tensor, value_T: Tensor, return_T: Tensor, advantage_T: Tensor) -> dict[str, Metric]:
    """The means over the p-th to the (2p - 1)-th token, and the value's bias across these ranges. position_T: int64, from 1."""
    octave_T = torch.bucketize(position_T, 2 ** torch.arange(62), right=True) - 1

    def sums(value_T: Tensor) -> list[float]:
        return torch.bincount(octave_T, weights=value_T.double()).tolist()

    counts, goals = sums(torch.ones_like(value_T)), sums(return_T)
    metrics: dict[str, Metric] = {}
    for name, totals in (("value", sums(value_T)), ("return", goals), ("advantage", sums(advantage_T))):
        means = enumerate(zip(totals, counts, strict=True))
        metrics |= {f"critic_by_position/{name}_from_{1 << octave}": Mean(total, count) for octave, (total, count) in means}
    groups = tuple(zip(counts, goals, sums(return_T - value_T), strict=True))
    return {**metrics, "critic/position_bias": GroupBias(groups, float(return_T.double().square().sum()))}


def loss_metrics(loss: Loss) -> dict[str, Metric]:
    """The means and peaks of one micro-batch's loss on this rank, as metrics."""
    means: dict[str, Metric] = {key: Mean(float(mean.total), float(mean.weight)) for key, mean in loss.mean.items()}
    return {**means, **{key: Max(float(peak)) for key, peak in loss.peak.items()}}


def values(value_R1: Tensor, row_T: Tensor, batch: Batch) -> Tensor:
    """Read a value model's output at the entries; a `model.OutputReader`.

    Args:
        value_R1: the output [R, 1].
        row_T: int64 [T], the entries' rows.
        batch: the entries; unused.

    Returns:
        float32 [T].
    """
    return value_R1[row_T, 0].float()
