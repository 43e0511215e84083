"""The critic's loss, the reward model, every preference loss and supervised training against their formulas."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Loss
from megarl.algorithms.dpo import Dpo
from megarl.algorithms.ops import Averaging, SumOver
from megarl.algorithms.pairs import pair_weights
from megarl.algorithms.reward_model import BradleyTerry
from megarl.algorithms.sft import Sft
from megarl.algorithms.value import explained_variance_sums, value_loss, value_weights
from megarl.batch import Batch
from tests.unit.algorithms import reference
from tests.unit.algorithms.cases import LENGTHS, PAIR_LOSSES, ragged, same

LossOf = Callable[[Tensor, Batch, SumOver], Loss]


def pairs(seed: int) -> tuple[Batch, Tensor]:
    """Chosen and rejected responses of lengths 1 to 40; without the response that `ragged` leaves empty."""
    batch, logp_T, _ = ragged(seed, list(range(1, 41)))
    kept = (batch.seq_T < 40).nonzero().squeeze(1)
    batch = replace(batch.take(kept), length_N=batch.length_N[:40], count_N=batch.count_N[:40])
    return batch, logp_T[kept]


def scored(seed: int) -> tuple[Batch, Tensor]:
    """As a reward model sees pairs: one loss token, the last, with a margin."""
    batch, _ = pairs(seed)
    mask_T = batch.position_T == batch.spread(batch.length_N) - 1
    generator = torch.Generator().manual_seed(seed)
    score_T = torch.randn(len(batch), generator=generator, dtype=torch.float64).masked_fill(~mask_T, torch.nan)
    batch = replace(batch, mask_T=mask_T, count_N=torch.ones_like(batch.count_N))
    margin_T = batch.spread(torch.rand(20, generator=generator, dtype=torch.float64).repeat_interleave(2))
    return batch.with_extra(margin=margin_T.masked_fill(~mask_T, torch.nan)), score_T


def gradient(loss_of: LossOf, x_T: Tensor, batch: Batch, weight_N: Tensor, sum_over: SumOver = same) -> tuple[Tensor, Tensor, Loss]:
    x_T = x_T.clone().requires_grad_()
    loss = loss_of(x_T, batch, sum_over)
    total = (loss.loss_T * torch.where(batch.mask_T, batch.spread(weight_N), 0.0)).sum()
    total.backward()
    assert x_T.grad is not None and bool((x_T.grad[~batch.mask_T] == 0).all())
    assert bool((loss.loss_T[~batch.mask_T] == 0).all())
    return total.detach(), x_T.grad, loss


def assert_formula(loss_of: LossOf, formula: Callable[[Tensor], Tensor], x_T: Tensor, batch: Batch, weight_N: Tensor) -> Loss:
    value, found_T, loss = gradient(loss_of, x_T, batch, weight_N)
    y_T = x_T.clone().requires_grad_()
    expected = formula(y_T)
    expected.backward()
    assert y_T.grad is not None
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(found_T[batch.mask_T], y_T.grad[batch.mask_T], rtol=1e-10, atol=1e-15)
    in_float32 = batch.with_extra(**{key: extra.float() for key, extra in batch.extra_T.items()})
    value_32, found_32, _ = gradient(loss_of, x_T.float(), in_float32, weight_N)
    assert float(value_32) == pytest.approx(float(value), rel=2e-4)
    torch.testing.assert_close(found_32.double(), found_T, rtol=2e-4, atol=2e-4 * float(found_T.abs().mean()))
    return loss


@pytest.mark.parametrize(("clip", "coef"), [(None, 0.5), (0.2, 0.5), (0.2, 1.0)])
def test_value_loss_is_the_formula(clip: float | None, coef: float) -> None:
    batch, _, _ = ragged(0, LENGTHS)
    value_T = batch.extra_T["value"] + 0.5 * torch.randn(len(batch), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def formula(v_T: Tensor) -> Tensor:
        kept = batch.mask_T
        v, goal, old = v_T[kept], batch.extra_T["return"][kept], batch.extra_T["value"][kept]
        square = (v - goal) ** 2
        if clip is not None:
            square = torch.max(square, (torch.clamp(v, old - clip, old + clip) - goal) ** 2)
        return coef * square.mean()

    loss = assert_formula(lambda v_T, part, _: value_loss(v_T, part, clip, coef), formula, value_T, batch, value_weights(batch.count_N))
    tokens = int(batch.mask_T.sum())
    assert float(loss.mean["critic/vf_loss"].total) / tokens == pytest.approx(float(formula(value_T)))
    assert float(loss.mean["critic/value"].total) / tokens == pytest.approx(float(value_T[batch.mask_T].mean()))
    assert (0.1 < float(loss.mean["critic/vf_clipfrac"].total) / tokens < 0.9) == (clip is not None)


def test_sums_of_explained_variance_add_up() -> None:
    batch, _, _ = ragged(1, LENGTHS)
    value_T, return_T, mask_T = batch.extra_T["value"], batch.extra_T["return"], batch.mask_T
    parts = [explained_variance_sums(value_T[part], return_T[part], mask_T[part]) for part in torch.arange(len(batch)).split(700)]
    count, goal, goal_square, error, error_square = torch.stack(parts).sum(0).tolist()
    expected = 1 - (return_T - value_T)[mask_T].var(correction=0) / return_T[mask_T].var(correction=0)
    found = 1 - (error_square / count - (error / count) ** 2) / (goal_square / count - (goal / count) ** 2)
    assert found == pytest.approx(float(expected), rel=1e-12) and count == int(mask_T.sum())


@pytest.mark.parametrize(("margin", "centre"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_reward_model_loss_is_the_formula(margin: bool, centre: float) -> None:
    objective = BradleyTerry(centre)
    batch, score_T = scored(2)
    if not margin:
        batch = batch.without("margin")

    def formula(x_T: Tensor) -> Tensor:
        score = [x_T[s.entry[-1]] for s in reference.sequences(batch, score_T, score_T)]
        extra = [s.margin[-1] if margin else 0.0 for s in reference.sequences(batch, score_T, score_T)]
        ranked = [-torch.log(torch.sigmoid(score[k] - score[k + 1] - extra[k])) for k in range(0, 40, 2)]
        return torch.stack([loss + centre * (score[2 * k] + score[2 * k + 1]) ** 2 for k, loss in enumerate(ranked)]).mean()

    loss = assert_formula(objective.loss, formula, score_T, batch, objective.weights(batch.count_N))
    assert float(loss.mean["rm/loss"].total) == pytest.approx(20 * float(formula(score_T)))
    assert float(loss.mean["rm/loss"].weight) == pytest.approx(20)
    gaps = [float(score_T[(batch.seq_T == n) & batch.mask_T] - score_T[(batch.seq_T == n + 1) & batch.mask_T]) for n in range(0, 40, 2)]
    assert float(loss.mean["rm/accuracy"].total) == pytest.approx(sum(gap > 0 for gap in gaps))
    assert float(loss.mean["rm/gap"].total) == pytest.approx(sum(gaps))


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_preference_loss_is_the_formula(name: str) -> None:
    preference = PAIR_LOSSES[name]
    batch, logp_T = pairs(3)
    batch = batch if preference.needs_reference else batch.without("ref_logp")
    loss = assert_formula(
        preference.loss,
        lambda x_T: reference.pairs_total(preference, batch, x_T),
        logp_T,
        batch,
        preference.weights(batch.count_N),
    )
    assert float(loss.mean["dpo/loss"].total) == pytest.approx(20 * float(reference.pairs_total(preference, batch, logp_T)))
    assert all(float(mean.weight) == pytest.approx(20) for mean in loss.mean.values())


@pytest.mark.parametrize("average", [False, True])
def test_what_dpo_shows(average: bool) -> None:
    dpo = Dpo(beta=0.3, average=average)
    batch, logp_T = pairs(3)
    shifts = [s.lp - s.ref_logp for s in reference.sequences(batch, logp_T, logp_T)]
    gain, shift = [0.3 * float(one.mean() if average else one.sum()) for one in shifts], [float(one.sum()) for one in shifts]
    margins = [gain[k] - gain[k + 1] for k in range(0, 40, 2)]
    expected = {
        "dpo/loss": 20 * float(reference.pairs_total(dpo, batch, logp_T)),
        "dpo/accuracy": sum(margin > 0 for margin in margins),
        "dpo/margin": sum(margins),
        "dpo/chosen_reward": sum(gain[0::2]),
        "dpo/rejected_reward": sum(gain[1::2]),
        "dpo/chosen_shift": sum(shift[0::2]),
        "dpo/rejected_shift": sum(shift[1::2]),
    }
    assert {name: float(mean.total) for name, mean in dpo.loss(logp_T, batch, same).mean.items()} == pytest.approx(expected)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("shift", [30.0, -30.0])
def test_pairs_far_apart_stay_finite(name: str, shift: float) -> None:
    batch, logp_T = pairs(4)
    batch = batch.with_extra(ref_logp=logp_T - torch.where(batch.seq_T % 2 == 0, shift, -shift))
    _, gradient_T, loss = gradient(PAIR_LOSSES[name].loss, logp_T.float(), batch, pair_weights(batch.count_N))
    assert bool(gradient_T.isfinite().all()) and bool(loss.loss_T.isfinite().all())
    batch, score_T = scored(4)
    score_T = (score_T + torch.where(batch.seq_T % 2 == 0, shift, -shift)).float()
    _, gradient_T, loss = gradient(BradleyTerry().loss, score_T, batch, pair_weights(batch.count_N))
    assert bool(gradient_T.isfinite().all()) and bool(loss.loss_T.isfinite().all())


def test_pairs_must_be_whole() -> None:
    assert pair_weights(torch.tensor([3, 1, 2, 7])).tolist() == [0.5] * 4
    for counts, said in (([3, 1, 2], "3 sequences, 0 of them"), ([3, 0], "2 sequences, 1 of them"), ([], "0 sequences")):
        with pytest.raises(ValueError, match=f"{said}.*no whole pairs"):
            pair_weights(torch.tensor(counts, dtype=torch.int64))


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    batch, logp_T, entropy_T = ragged(5, LENGTHS)

    def loss_of(x_T: Tensor, part: Batch, sum_over: SumOver) -> Loss:
        return Sft().loss(x_T, part.with_extra(entropy=entropy_T.to(x_T.dtype)), sum_over)

    assert_formula(loss_of, lambda x_T: -x_T[batch.mask_T].mean(), logp_T, batch, Sft().weights(batch.count_N))


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_sft_and_critic_average_as_they_are_told(aggregation: Averaging) -> None:
    batch, logp_T, _ = ragged(5, LENGTHS)
    weight_N = Sft(aggregation).weights(batch.count_N)
    assert torch.equal(weight_N, value_weights(batch.count_N, aggregation))

    def formula(x_T: Tensor) -> Tensor:
        rows = [-s.lp for s in reference.sequences(batch, x_T, x_T)]
        return torch.stack([row.mean() if aggregation == "seq-mean-token-mean" else row.sum() for row in rows]).mean()

    with_entropy = batch.with_extra(entropy=logp_T)
    assert_formula(lambda x_T, part, sum_over: Sft(aggregation).loss(x_T, part, sum_over), formula, logp_T, with_entropy, weight_N)
