"""What the ranks of the pool do to compare the losses on several layouts: each on a rank's share of a batch, alone and through the model.

Axes: T predicted tokens, N sequences, R rows of local logits, V local vocabulary shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import Loss, PolicyAlgorithm
from megarl.algorithms.ops import Averaging, SumOver
from megarl.algorithms.pairs import PairLoss
from megarl.algorithms.reward_model import BradleyTerry
from megarl.algorithms.sft import Sft
from megarl.algorithms.value import value_loss, value_weights
from megarl.batch import Batch
from megarl.observe.metrics import Max, Mean, Metric, merge
from megarl.parallel import schedule
from megarl.parallel.collectives import summed
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy
from tests.distributed.tiny_training import TINY, Job, build, global_batch, shares
from tests.unit.algorithms.cases import ALGORITHMS, PAIR_LOSSES, cast, contiguous, corrected, ragged, selected, weighted, zigzag

Cut = Literal["contiguous", "zigzag"]
LENGTHS = [1, 40, 2, 17, 3, 9, 25, 300, 5, 1, 33, 12, 8]  # with the response without loss tokens 14, so 7 pairs


@dataclass(frozen=True)
class Setting:
    """One loss on its global batch. `prepare` adds what whole sequences give, summed over data-parallel ranks: advantages, a correction."""

    batch: Batch
    x_T: Tensor  # log-probs, or what a head puts out
    loss: Callable[[Tensor, Batch, SumOver], Loss]
    prepare: Callable[[Batch, SumOver], dict[str, Tensor]] | None = None


def policy(algorithm: PolicyAlgorithm) -> Setting:
    """A policy loss, with the advantages that it makes of rewards and values."""
    batch, logp_T, entropy_T = ragged(0, LENGTHS)
    return Setting(
        weighted(algorithm, batch.with_extra(entropy=entropy_T)),
        logp_T,
        lambda x_T, part, sum_over: algorithm.loss(x_T, part.extra_T["entropy"], part, sum_over, algorithm.kl_coef),
        lambda part, sum_over: (
            {"advantage": algorithm.token_advantages(part, sum_over, algorithm.kl_coef)}
            | corrected(algorithm, part, sum_over)
            | selected(algorithm, part, sum_over)
        ),
    )


def value(aggregation: Averaging = "token-mean") -> Setting:
    """The critic's clipped loss, a little off the old values."""
    batch, logp_T, _ = ragged(1, LENGTHS)
    x_T = batch.extra_T["value"] + 0.1 * logp_T
    weighted = with_weights(batch, lambda count_N: value_weights(count_N, aggregation))
    return Setting(weighted, x_T, lambda x_T, part, _: value_loss(x_T, part, 0.2, 0.5))


def sft(aggregation: Averaging = "token-mean") -> Setting:
    """Negative log-likelihood."""
    batch, logp_T, _ = ragged(2, LENGTHS)
    own = Sft(aggregation)
    return Setting(
        with_weights(batch, own.weights), logp_T, lambda x_T, part, sum_over: own.loss(x_T, part.with_extra(entropy=x_T), sum_over)
    )


def preferences(loss: PairLoss) -> Setting:
    """Pairs with loss tokens in the second half of every sequence."""
    batch, x_T = pairs(lambda batch: batch.spread(batch.length_N) // 2)
    return Setting(with_weights(batch, loss.weights), x_T, loss.loss)


def reward_model(centre: float = 0.0) -> Setting:
    """Pairs with one loss token a sequence, the last."""
    batch, x_T = pairs(lambda batch: batch.spread(batch.length_N) - 1)
    own = BradleyTerry(centre)
    return Setting(with_weights(batch, own.weights), x_T, own.loss)


def pairs(first_T: Callable[[Batch], Tensor]) -> tuple[Batch, Tensor]:
    """Sequences with loss tokens from a position on, and numbers for them."""
    batch, _, _ = ragged(3, LENGTHS)
    mask_T = batch.position_T >= first_T(batch)
    drawn = torch.randn(3, len(batch), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x_T, ref_T, margin_T = drawn.masked_fill(~mask_T, torch.nan)
    batch = replace(batch, mask_T=mask_T, count_N=torch.bincount(batch.seq_T[mask_T]))
    return batch.with_extra(ref_logp=ref_T, margin=margin_T.abs()), x_T


def with_weights(batch: Batch, weights: Callable[[Tensor], Tensor]) -> Batch:
    """The global batch with the weights of its loss tokens."""
    return batch.with_extra(weight=torch.where(batch.mask_T, batch.spread(weights(batch.count_N)), 0.0))


SETTINGS: dict[str, Callable[[], Setting]] = {
    **{name: partial(policy, algorithm) for name, algorithm in ALGORITHMS.items()},
    "value": value,
    "value_by_response": partial(value, "seq-mean-token-mean"),
    "value_by_sum": partial(value, "seq-mean-token-sum"),
    "sft": sft,
    "sft_by_response": partial(sft, "seq-mean-token-mean"),
    "sft_by_sum": partial(sft, "seq-mean-token-sum"),
    **{name: partial(preferences, loss) for name, loss in PAIR_LOSSES.items()},
    "reward_model": reward_model,
    "reward_model_centred": partial(reward_model, 0.3),
}


@dataclass(frozen=True)
class Part:
    """What one rank brings of one loss; arrays over the global batch, 0 where the rank has no entry."""

    total: float
    gradient_T: np.ndarray
    advantage_T: np.ndarray
    metrics: dict[str, Metric]


def losses(grid: Grid, cut: Cut, micro_batches: int, names: Sequence[str]) -> dict[str, Part]:
    """Losses on a rank's share: pairs of sequences by data-parallel rank and micro-batch, their entries by context-parallel rank."""
    return {name: _part(grid, cut, micro_batches, SETTINGS[name]()) for name in names}


def _part(grid: Grid, cut: Cut, micro_batches: int, given: Setting) -> Part:
    batch, pair_T = given.batch, given.batch.seq_T // 2
    mine_T = (pair_T % grid.dp_size == grid.dp_rank).nonzero().squeeze(1)
    if given.prepare is not None:
        made = given.prepare(batch.take(mine_T), lambda value: summed(value, grid.groups.dp))
        batch = batch.with_extra(
            **{name: torch.zeros(len(batch), dtype=made_T.dtype).index_copy(0, mine_T, made_T) for name, made_T in made.items()}
        )
    x_T = given.x_T.clone().requires_grad_()
    held_T, place_T = _held(batch, cut, grid.cp_rank, grid.cp_size), pair_T // grid.dp_size % micro_batches
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for micro_batch in range(micro_batches):
        entry_T = mine_T[(held_T & (place_T == micro_batch))[mine_T]]
        part = batch.take(entry_T)
        loss = given.loss(x_T[entry_T], part, lambda value: summed(value, grid.groups.cp))
        total = total + (loss.loss_T * part.extra_T["weight"]).sum() + (0 if loss.weighted is None else loss.weighted)
        metrics.append(shown(loss))
    total.backward()
    assert x_T.grad is not None
    reported = grid.cp_rank == 0 and given.prepare is not None
    advantage_T = torch.where(batch.mask_T, batch.extra_T["advantage"], 0.0) if reported else torch.zeros(len(batch))
    return Part(float(total.detach()), x_T.grad.numpy(), advantage_T.numpy(), merge(metrics))


def _held(batch: Batch, cut: Cut, rank: int, ranks: int) -> Tensor:
    positions = {"contiguous": contiguous, "zigzag": zigzag}[cut]
    held_T = torch.zeros(len(batch), dtype=torch.bool)
    for n, length in enumerate(batch.length_N.tolist()):
        held_T |= (batch.seq_T == n) & torch.isin(batch.position_T, torch.tensor(positions(length, rank, ranks)))
    return held_T


def shown(loss: Loss) -> dict[str, Metric]:
    """What a loss reports, with the reductions that it declares."""
    means: dict[str, Metric] = {name: Mean(float(mean.total), float(mean.weight)) for name, mean in loss.mean.items()}
    return {**means, **{name: Max(float(peak)) for name, peak in loss.peak.items()}}


@dataclass(frozen=True)
class Slopes:
    """The largest slopes of a loss by the logits that predict tokens which are learned from, and by all others, padding too."""

    learned: float
    others: float


@dataclass(frozen=True)
class Step:
    """What one rank saw of one loss through the model."""

    grad_norm: float
    total: float
    metrics: dict[str, Metric]
    slopes: list[Slopes]  # of each micro-batch, on the last stage


def through_the_model(grid: Grid, job: Job, names: Sequence[str]) -> dict[str, Step]:
    """The gradient norms of policy losses: one model, one forward and backward each, no optimizer step."""
    trainable, batch = build(grid, job), conversations(global_batch(job.sequences))
    reports = grid.is_last_stage and grid.tp_rank == 0
    steps = {}
    seen: list[tuple[Tensor, Tensor]] = []  # of each micro-batch the largest slope by a row of logits, and whether it predicts such a token
    for name in names:
        algorithm = ALGORITHMS[name]

        def loss_fn(
            logits_RV: Tensor, row_T: Tensor, part: Batch, algorithm: PolicyAlgorithm = algorithm
        ) -> tuple[Tensor, tuple[float, dict[str, Metric]]]:
            logp_T, entropy_T = logprob_entropy(logits_RV, row_T, part.target_T, 1.0, grid.groups.tp, TINY["vocab_size"])
            loss = algorithm.loss(logp_T, entropy_T, part, lambda value: summed(value, grid.groups.cp), algorithm.kl_coef)
            total = (loss.loss_T * part.extra_T["weight"]).sum() + (0 if loss.weighted is None else loss.weighted)
            learned_R = torch.zeros(len(logits_RV), dtype=torch.bool).index_fill(0, row_T[part.mask_T], True)
            logits_RV.register_hook(lambda slope_RV: seen.append((slope_RV.abs().amax(1), learned_R)))
            return total, (float(total.detach()), shown(loss))

        seen.clear()
        mine = shares(_off_policy(batch, algorithm), job.micro_batches)[grid.dp_rank :: grid.dp_size]
        trainable.zero_grad()
        results = schedule.run(trainable.chunks, mine, loss_fn, grid, forward_only=False)
        trainable.optimizer.prepare_grads()
        norm = float(trainable.optimizer.get_grad_norm())
        results = results if reports else []
        slopes = [Slopes(*(float(slope_R[rows_R].max()) for rows_R in (learned_R, ~learned_R))) for slope_R, learned_R in seen]
        steps[name] = Step(norm, sum(total for total, _ in results), merge(metrics for _, metrics in results), slopes)
    return steps


def conversations(batch: Batch) -> Batch:
    """The batch with answers of an environment in its responses, which are not learned from: two tokens in five."""
    mask_T = batch.mask_T & (batch.position_T % 5 < 3)
    return replace(batch, mask_T=mask_T, count_N=torch.bincount(batch.seq_T[mask_T], minlength=len(batch.length_N)))


def _off_policy(batch: Batch, algorithm: PolicyAlgorithm) -> Batch:
    """The batch as if it had been sampled from another policy: log-probs around those of a random model of this vocabulary."""
    generator = torch.Generator().manual_seed(5)
    sequences = len(batch.length_N)

    def drawn(around: Tensor, scale: float) -> Tensor:
        return around + scale * torch.randn(len(batch), generator=generator)

    old_T = drawn(torch.full((len(batch),), -float(np.log(TINY["vocab_size"]))), 0.3)
    batch = batch.with_extra(
        old_logp=old_T,
        ref_logp=drawn(old_T, 0.2),
        rollout_logp=drawn(old_T, 0.05),
        advantage=batch.spread(torch.randn(sequences, generator=generator)),
        reward=batch.spread((torch.rand(sequences, generator=generator) > 0.5).double()),
        logp=drawn(old_T, 0.3),
        lot=torch.randperm(len(batch), generator=generator),
    )
    return cast(weighted(algorithm, batch), torch.float32)
