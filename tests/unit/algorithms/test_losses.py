"""Every policy loss against its formula: value, gradient, metrics; garbage, precision, extremes, any split of the tokens."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import PolicyAlgorithm, blocks
from megarl.algorithms.cispo import Cispo
from megarl.algorithms.gmpo import Gmpo
from megarl.algorithms.grpo import Grpo
from megarl.algorithms.gspo import Gspo
from megarl.algorithms.ops import Block, SumOver, token_weights
from megarl.algorithms.rloo import Rloo
from megarl.algorithms.sapo import Sapo
from megarl.batch import Batch
from tests.unit.algorithms import reference
from tests.unit.algorithms.cases import ALGORITHMS, LENGTHS, cast, contiguous, make, ragged, same, together, weighted, zigzag

every = pytest.mark.parametrize("name", ALGORITHMS)


def evaluate(algorithm: PolicyAlgorithm, batch: Batch, logp_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
    """The loss of a global batch, its gradients with respect to log-probs and entropies, and what it reports."""
    logp_T, entropy_T = logp_T.clone().requires_grad_(), entropy_T.clone().requires_grad_()
    loss = algorithm.loss(logp_T, entropy_T, batch, same, algorithm.kl_coef)
    total = (loss.loss_T * batch.extra_T["weight"]).sum()
    if loss.weighted is not None:
        total = total + loss.weighted
    total.backward()
    assert logp_T.grad is not None
    return total.detach(), logp_T.grad, torch.zeros_like(logp_T) if entropy_T.grad is None else entropy_T.grad, loss


def mean_of(loss: Any, name: str) -> float:
    return float(loss.mean[name].total) / float(loss.mean[name].weight)


@every
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradients_are_those_of_the_formula(name: str, seed: int) -> None:
    algorithm = ALGORITHMS[name]
    batch, logp_T, entropy_T = ragged(seed, LENGTHS)
    batch = weighted(algorithm, batch)
    value, gradient_T, entropy_gradient_T, loss = evaluate(algorithm, batch, logp_T, entropy_T)
    x_T, e_T = logp_T.clone().requires_grad_(), entropy_T.clone().requires_grad_()
    expected = reference.total(algorithm, batch, x_T, e_T)
    expected.backward()
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert x_T.grad is not None and e_T.grad is not None
    scale = float(x_T.grad[batch.mask_T].abs().max())
    torch.testing.assert_close(gradient_T[batch.mask_T], x_T.grad[batch.mask_T], rtol=1e-10, atol=1e-13 * scale)
    torch.testing.assert_close(entropy_gradient_T[batch.mask_T], e_T.grad[batch.mask_T], rtol=1e-12, atol=0)
    for masked_T in (gradient_T[~batch.mask_T], entropy_gradient_T[~batch.mask_T], loss.loss_T[~batch.mask_T].detach()):
        assert bool((masked_T == 0).all())


class ClippedFormula(Grpo):
    def policy_loss(self, block: Block) -> Tensor:
        return pessimistic(self, block.d_T.exp(), block.advantage_T)


def pessimistic(algorithm: Grpo | Gspo, ratio_T: Tensor, advantage_T: Tensor) -> Tensor:
    clipped_T = ratio_T.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss_T = torch.maximum(-ratio_T * advantage_T, -clipped_T * advantage_T)
    bounded_T = torch.minimum(loss_T, -algorithm.dual_clip * advantage_T) if algorithm.dual_clip is not None else loss_T
    return torch.where(advantage_T < 0, bounded_T, loss_T)


class GspoFormula(Gspo):
    def policy_loss(self, block: Block) -> Tensor:
        assert block.mean_T is not None
        return pessimistic(self, block.mean_T.exp(), block.advantage_T)


class GmpoFormula(Gmpo):
    def policy_loss(self, block: Block) -> Tensor:
        assert block.mean_T is not None
        return -block.advantage_T * block.mean_T.exp()


class CispoFormula(Cispo):
    def policy_loss(self, block: Block) -> Tensor:
        return -block.d_T.exp().clamp(1 - self.clip_low, 1 + self.clip_high).detach() * block.advantage_T * block.lp_T


class SapoFormula(Sapo):
    def policy_loss(self, block: Block) -> Tensor:
        tau_T = torch.full_like(block.d_T, self.tau_negative).masked_fill(block.advantage_T > 0, self.tau_positive)
        return -4 / tau_T * torch.sigmoid(tau_T * (block.d_T.exp() - 1)) * block.advantage_T


class RlooFormula(Rloo):
    def policy_loss(self, block: Block) -> Tensor:
        if self.clip_low is not None and self.clip_high is not None and block.mean_T is not None:
            ratio_T = (block.mean_T * block.count_T).clamp(-self.ratio_bound, self.ratio_bound).exp()
            clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high)
            return -torch.minimum(ratio_T * block.advantage_T, clipped_T * block.advantage_T) / block.count_T
        return -block.d_T.exp().detach() * block.advantage_T * block.lp_T


class Plain(Rloo):
    policy_term = PolicyAlgorithm.policy_term

    def policy_loss(self, block: Block) -> Tensor:
        return block.lp_T


class Copied(Plain):
    def policy_loss(self, block: Block) -> Tensor:
        return 2 * block.lp_T - block.lp_T


def test_a_formula_may_be_its_own_input() -> None:
    """Value and slope are changed in place by the KL and the correction: neither may be memory that something else reads."""
    settings = {"kl_coef": 0.1, "kl_in": "loss", "kl_kind": "k2", "correction": {"type": "tis", "cap": 1.05}}
    batch, logp_T, entropy_T = ragged(5, LENGTHS[:20])
    (value, slope_T), (copied, copied_T) = (
        evaluate(algorithm, weighted(algorithm, batch), logp_T, entropy_T)[:2]
        for algorithm in (Plain.model_validate(settings), Copied.model_validate(settings))
    )
    assert float(value) == pytest.approx(float(copied), rel=1e-12)
    torch.testing.assert_close(slope_T[batch.mask_T], copied_T[batch.mask_T], rtol=1e-12, atol=0)


FORMULAS: dict[type[PolicyAlgorithm], type[PolicyAlgorithm]] = {
    Grpo: ClippedFormula,
    Gspo: GspoFormula,
    Gmpo: GmpoFormula,
    Cispo: CispoFormula,
    Sapo: SapoFormula,
    Rloo: RlooFormula,
}


@pytest.mark.parametrize("name", [name for name, algorithm in ALGORITHMS.items() if type(algorithm) in FORMULAS])
def test_a_formula_alone_gives_the_slope_that_was_derived_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under a correction, with a KL in the loss, and where tokens are clipped."""
    algorithm = ALGORITHMS[name]
    formula = FORMULAS[type(algorithm)]
    monkeypatch.setattr(formula, "policy_term", PolicyAlgorithm.policy_term)
    plain = formula(**algorithm.model_dump())
    batch, logp_T, entropy_T = ragged(4, LENGTHS)
    batch = weighted(algorithm, batch)
    value, gradient_T, _, _ = evaluate(algorithm, batch, logp_T, entropy_T)
    mine, slope_T, _, _ = evaluate(plain, batch, logp_T, entropy_T)
    assert float(mine) == pytest.approx(float(value), rel=1e-12)
    torch.testing.assert_close(slope_T, gradient_T, rtol=1e-10, atol=1e-14)


@every
def test_float32_is_near_float64(name: str) -> None:
    algorithm = ALGORITHMS[name]
    batch, logp_T, entropy_T = ragged(2, LENGTHS)
    batch = weighted(algorithm, cast(cast(batch, torch.float32), torch.float64))  # the same numbers in both
    logp_T, entropy_T = logp_T.float().double(), entropy_T.float().double()
    value, gradient_T, _, _ = evaluate(algorithm, batch, logp_T, entropy_T)
    value_32, gradient_32, _, loss = evaluate(algorithm, cast(batch, torch.float32), logp_T.float(), entropy_T.float())
    assert loss.loss_T.dtype == gradient_32.dtype == torch.float32
    assert float(value_32) == pytest.approx(float(value), rel=2e-4)
    torch.testing.assert_close(gradient_32.double(), gradient_T, rtol=2e-4, atol=2e-4 * float(gradient_T.abs().mean()))


@every
@pytest.mark.parametrize("shift", [30.0, -30.0, 100.0, -100.0])
def test_log_ratios_of_a_hundred_stay_finite(name: str, shift: float) -> None:
    algorithm = ALGORITHMS[name]
    batch, logp_T, entropy_T = ragged(3, [1, 2, 40, 40, 7])
    moved = {key: batch.extra_T[key] - shift for key in ("old_logp", "ref_logp")}
    for extra in (moved, {**moved, "rollout_logp": moved["old_logp"] + 30.0}, {**moved, "rollout_logp": moved["old_logp"] - 30.0}):
        given = cast(weighted(algorithm, batch.with_extra(**extra)), torch.float32)
        value, gradient_T, _, loss = evaluate(algorithm, given, logp_T.float(), entropy_T.float())
        numbers = [value, gradient_T, *(mean.total for mean in loss.mean.values()), *loss.peak.values()]
        assert all(bool(number.isfinite().all()) for number in numbers)


@every
@pytest.mark.parametrize("cut", [contiguous, zigzag])
def test_any_split_of_the_tokens_gives_the_same(name: str, cut: Callable[[int, int, int], list[int]]) -> None:
    """Three shares of every sequence, whose sums over sequences are joined as a collective would."""
    algorithm = ALGORITHMS[name]
    batch, logp_T, entropy_T = ragged(4, [1, 2, 3, 5, 30, 9])
    batch = weighted(algorithm, batch)
    value, gradient_T, _, _ = evaluate(algorithm, batch, logp_T, entropy_T)
    holder_T = torch.empty(len(batch), dtype=torch.int64)
    for rank in range(3):
        for n, length in enumerate(batch.length_N.tolist()):
            holder_T[(batch.seq_T == n) & torch.isin(batch.position_T, torch.tensor(cut(length, rank, 3)))] = rank
    shares = [(holder_T == rank).nonzero().squeeze(1) for rank in range(3)]
    x_T = logp_T.clone().requires_grad_()

    def run(rank: int, sum_over: SumOver) -> Tensor:
        part = batch.take(shares[rank])
        loss = algorithm.loss(x_T[shares[rank]], entropy_T[shares[rank]], part, sum_over, algorithm.kl_coef)
        return (loss.loss_T * part.extra_T["weight"]).sum() + (0 if loss.weighted is None else loss.weighted)

    total = torch.stack(together(run, ranks=3)).sum()
    total.backward()
    assert float(total.detach()) == pytest.approx(float(value), rel=1e-12)
    assert x_T.grad is not None
    torch.testing.assert_close(x_T.grad, gradient_T, rtol=1e-11, atol=1e-15)


@every
def test_blocks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = ALGORITHMS[name]
    batch, logp_T, entropy_T = ragged(13, LENGTHS[:-1])
    batch = weighted(algorithm, batch)
    answers = []
    for entries in (len(batch), 97):
        monkeypatch.setattr(blocks, "ENTRIES", entries)
        *numbers, loss = evaluate(algorithm, batch, logp_T, entropy_T)
        answers.append([*numbers, {key: mean.total.double() for key, mean in loss.mean.items()}, dict(loss.peak)])
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-12, atol=1e-15)


def test_share_without_tokens_is_a_loss_of_nothing() -> None:
    for name, algorithm in ALGORITHMS.items():
        batch, logp_T, entropy_T = ragged(5, [3, 4])
        batch = weighted(algorithm, batch).take(torch.empty(0, dtype=torch.int64))
        loss = algorithm.loss(logp_T[:0].requires_grad_(), entropy_T[:0], batch, same, algorithm.kl_coef)
        assert len(loss.loss_T) == 0 and loss.loss_T.requires_grad, name
        assert all(float(mean.weight) == 0 for mean in loss.mean.values()), name


def test_gspo_token_is_gspo() -> None:
    """Equal values and gradients with one advantage per sequence; the token form is compared with the sequence form in `reference`."""
    batch, logp_T, entropy_T = ragged(6, LENGTHS[:-1])
    answers = []
    for kind in ("gspo", "gspo_token"):
        algorithm = make({"type": kind, "clip_low": 0.05, "clip_high": 0.04})
        value, gradient_T, _, _ = evaluate(algorithm, weighted(algorithm, batch), logp_T, entropy_T)
        answers.append((value, gradient_T))
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gspo_token", "grpo", "cispo_narrow", "rloo"])
def test_advantage_may_differ_from_token_to_token(name: str) -> None:
    algorithm = ALGORITHMS[name]
    batch, logp_T, entropy_T = ragged(7, LENGTHS[:-1])
    batch = weighted(algorithm, batch.with_extra(advantage=batch.extra_T["value"]))
    _, gradient_T, _, _ = evaluate(algorithm, batch, logp_T, entropy_T)
    x_T = logp_T.clone().requires_grad_()
    reference.total(algorithm, batch, x_T, entropy_T).backward()
    assert x_T.grad is not None
    torch.testing.assert_close(gradient_T[batch.mask_T], x_T.grad[batch.mask_T], rtol=1e-10, atol=1e-15)


def test_metrics_are_what_they_say() -> None:
    algorithm: Any = make({"type": "dapo", "dual_clip": 1.3, "kl_coef": 0.1})
    batch, logp_T, entropy_T = ragged(8, LENGTHS)
    _, _, _, loss = evaluate(algorithm, weighted(algorithm, batch), logp_T, entropy_T)
    kept = batch.mask_T
    d, ref = (logp_T - batch.extra_T["old_logp"])[kept], (logp_T - batch.extra_T["ref_logp"])[kept]
    r, a = d.exp(), batch.extra_T["advantage"][kept]
    high, low, dual = (r > 1.28) & (a > 0), (r < 0.8) & (a < 0), (r > 1.3) & (a < 0)
    expected = {
        "actor/pg_clipfrac": (high | low).double(),
        "actor/pg_clipfrac_high": high.double(),
        "actor/pg_clipfrac_low": low.double(),
        "actor/pg_clipfrac_lower": dual.double(),
        "actor/ppo_kl": -d,
        "actor/ratio_gt_2": ((r > 2) | (r < 0.5)).double(),
        "actor/kl_loss": torch.exp(-ref) - 1 + ref,
        "actor/entropy": entropy_T[kept],
    }
    assert loss.mean.keys() == expected.keys()
    for name, value in expected.items():
        assert 0 != mean_of(loss, name) == pytest.approx(float(value.mean()), rel=1e-12), name
    peaks = {"actor/ratio_max": r.max(), "actor/ratio_inverse_max": (1 / r).max()}
    assert {name: float(peak) for name, peak in loss.peak.items()} == pytest.approx({name: float(peak) for name, peak in peaks.items()})


@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_wide", "gmpo", "cispo_narrow"])
def test_clip_fractions_of_both_sides(name: str) -> None:
    """Where a token has lost its gradient (CISPO: where its weight is cut), as a share of the loss tokens."""
    algorithm: Any = ALGORITHMS[name]
    batch, logp_T, entropy_T = ragged(9, LENGTHS[:-1])
    _, _, _, loss = evaluate(algorithm, weighted(algorithm, batch), logp_T, entropy_T)
    high, low, cut = 0, 0, 0
    for s in reference.sequences(batch, logp_T, entropy_T):
        d, advantage = s.lp - s.old_logp, float(s.advantage[0])
        d = d.mean().expand(len(s)) if algorithm.type == "gspo" else d
        bounds = (1 + algorithm.clip_high, 1 - algorithm.clip_low)
        upper, lower = (algorithm.clip_high, -algorithm.clip_low) if algorithm.type == "gmpo" else map(math.log, bounds)
        high += int((d > upper).sum()) if advantage > 0 or algorithm.type == "cispo" else 0
        low += int((d < lower).sum()) if advantage < 0 or algorithm.type == "cispo" else 0
        cut += bool(d[0] > upper and advantage > 0 or d[0] < lower and advantage < 0)
    tokens = int(batch.mask_T.sum())
    assert 0.01 < high / tokens < 0.6 and 0.01 < low / tokens < 0.6
    found = [mean_of(loss, f"actor/pg_clipfrac{side}") for side in ("_high", "_low", "")]
    assert found == pytest.approx([high / tokens, low / tokens, (high + low) / tokens])
    if algorithm.type == "gspo":
        assert mean_of(loss, "actor/seq_clipfrac") == pytest.approx(cut / int((batch.count_N > 0).sum()))


def test_clip_fractions_of_other_systems() -> None:
    """TRL's of CISPO; verl's two of GMPO, which count what is outside the range on either side."""
    batch, logp_T, entropy_T = ragged(9, LENGTHS[:-1])
    d, advantage = (logp_T - batch.extra_T["old_logp"])[batch.mask_T], batch.extra_T["advantage"][batch.mask_T]
    expected = {
        ("cispo_narrow", "actor/pg_clipfrac_high_positive"): (d.exp() > 1.2) & (advantage > 0),
        ("gmpo", "actor/outside_positive"): ((d > 0.2) | (d < -0.3)) & (advantage > 0),
        ("gmpo", "actor/outside_negative"): ((d > 0.2) | (d < -0.3)) & (advantage < 0),
    }
    for (name, metric), where in expected.items():
        _, _, _, loss = evaluate(ALGORITHMS[name], weighted(ALGORITHMS[name], batch), logp_T, entropy_T)
        assert 0 < mean_of(loss, metric) == pytest.approx(float(where.double().mean())), metric


def test_kl_without_a_clamp_is_the_estimator() -> None:
    batch, logp_T, entropy_T = ragged(11, LENGTHS[:-1], spread=3.0)
    algorithm = make({"type": "grpo", "kl_coef": 0.5, "kl_clamp": None})
    d_T = (batch.extra_T["ref_logp"] - logp_T)[batch.mask_T]
    k3_T = d_T.exp() - 1 - d_T
    assert float(k3_T.max()) > 100
    _, gradient_T, _, loss = evaluate(algorithm, weighted(algorithm, batch), logp_T, entropy_T)
    assert mean_of(loss, "actor/kl_loss") == pytest.approx(float(k3_T.mean()), rel=1e-12)
    _, without_T, _, _ = evaluate(make({"type": "grpo"}), weighted(algorithm, batch), logp_T, entropy_T)
    slope_T = 0.5 * (1 - d_T.exp()) * weighted(algorithm, batch).extra_T["weight"][batch.mask_T]
    torch.testing.assert_close((gradient_T - without_T)[batch.mask_T], slope_T, rtol=1e-9, atol=1e-12)


def test_the_gate_of_sapo_takes_nothing_where_the_policy_is_the_old_one_and_its_share_elsewhere() -> None:
    algorithm: Any = ALGORITHMS["sapo_sharp"]
    batch, logp_T, entropy_T = ragged(9, LENGTHS[:-1])
    _, _, _, loss = evaluate(algorithm, weighted(algorithm, batch), logp_T, entropy_T)
    share, tokens = 0.0, int(batch.mask_T.sum())
    for s in reference.sequences(batch, logp_T, entropy_T):
        tau = algorithm.tau_positive if s.advantage[0] > 0 else algorithm.tau_negative
        share += float((1 - 1 / torch.cosh(tau * ((s.lp - s.old_logp).exp() - 1) / 2) ** 2).sum())  # 4 p (1 - p) = sech^2(x / 2)
    assert 0.01 < mean_of(loss, "actor/pg_gated") == pytest.approx(share / tokens)
    same_policy = batch.with_extra(old_logp=logp_T)
    _, gradient_T, _, loss = evaluate(make({"type": "sapo"}), weighted(algorithm, same_policy), logp_T, entropy_T)
    _, plain_T, _, _ = evaluate(make({"type": "grpo"}), weighted(algorithm, same_policy), logp_T, entropy_T)
    assert mean_of(loss, "actor/pg_gated") == 0
    torch.testing.assert_close(gradient_T, plain_T, rtol=1e-12, atol=1e-15)


def test_positive_examples_are_counted_over_the_global_batch() -> None:
    algorithm: Any = ALGORITHMS["vapo"]
    count_N, reward_N = torch.tensor([3, 0, 5, 2]), torch.tensor([1.0, 1.0, 0.0, 0.5])
    assert algorithm.positive_weights(count_N, reward_N).tolist() == [0.1 / 5, 0.0, 0.0, 0.1 / 5]
    assert algorithm.positive_weights(count_N, torch.full((4,), -1.0)).tolist() == [0.0] * 4
    batch, logp_T, entropy_T = ragged(10, LENGTHS)
    _, _, _, loss = evaluate(algorithm, weighted(algorithm, batch), logp_T, entropy_T)
    correct_T = batch.mask_T & (batch.extra_T["reward"] > 0)
    assert 0 < mean_of(loss, "actor/positive_nll") == pytest.approx(-float(logp_T[correct_T].mean()))
    assert float(loss.weighted.detach()) == pytest.approx(0.1 * mean_of(loss, "actor/positive_nll"))


def test_without_a_correct_response_there_is_nothing_to_imitate() -> None:
    batch, logp_T, entropy_T = ragged(10, [4, 8, 2])
    algorithm = ALGORITHMS["vapo"]
    _, _, _, loss = evaluate(algorithm, weighted(algorithm, batch).without("positive_weight"), logp_T, entropy_T)
    assert loss.weighted is None
    assert ALGORITHMS["vapo_without_imitation"].positive_weights(batch.count_N, torch.ones(len(batch.count_N))) is None


@pytest.mark.gpu
@every
def test_the_same_on_a_gpu(name: str) -> None:
    algorithm, device = ALGORITHMS[name], torch.device("cuda")
    batch, logp_T, entropy_T = ragged(12, LENGTHS)
    batch = weighted(algorithm, batch)
    here = evaluate(algorithm, batch, logp_T, entropy_T)
    there = evaluate(algorithm, batch.to(device), logp_T.to(device), entropy_T.to(device))
    torch.testing.assert_close([tensor.cpu() for tensor in there[:3]], list(here[:3]), rtol=1e-10, atol=1e-14)


def test_token_weights_by_hand() -> None:
    count = torch.tensor([2, 0, 4])
    assert token_weights(count, "token-mean").tolist() == pytest.approx([1 / 6, 0, 1 / 6])
    assert token_weights(count, "seq-mean-token-mean").tolist() == pytest.approx([1 / 4, 0, 1 / 8])
    assert token_weights(count, "seq-mean-token-sum").tolist() == pytest.approx([1 / 2, 0, 1 / 2])
    assert token_weights(count, "seq-mean-token-sum-norm", 10).tolist() == pytest.approx([1 / 30, 0, 1 / 30])  # a constant denominator
    assert token_weights(count, "seq-mean-token-sum-norm", 10, "one").tolist() == pytest.approx([1 / 10, 0, 1 / 10])
    assert token_weights(count, "seq-mean-token-sum-norm", 10, "trained").tolist() == pytest.approx([1 / 20, 0, 1 / 20])
    assert token_weights(count, "seq-mean-token-mean", None, "all").tolist() == pytest.approx([1 / 6, 0, 1 / 12])
    assert token_weights(count, "seq-mean-token-sum", None, "one").tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="no loss token in 2 sequences"):
        token_weights(torch.zeros(2, dtype=torch.int64), "token-mean")
    with pytest.raises(ValueError, match="needs a horizon"):
        token_weights(count, "seq-mean-token-sum-norm")
