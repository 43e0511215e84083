"""GRPO and GSPO against independent loops in float64: values and gradients, ragged, masked garbage, clipping on both sides."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from megarl.algorithms import PolicyAlgorithm
from megarl.algorithms.grpo import Grpo
from megarl.algorithms.gspo import Gspo
from megarl.algorithms.ops import group_normalised, token_weights
from megarl.algorithms.sft import Sft
from megarl.batch import Batch, Sample, balance, bins_needed, pack


def ragged_batch(seed: int, lengths: list[int]) -> tuple[Batch, Tensor]:
    """A float64 batch with ratios that clip on both sides, both signs of advantage, NaN in masked entries; and its log-probs."""
    rng = np.random.default_rng(seed)
    samples = [Sample(rng.integers(3, 50, length + 4).astype(np.int32), 4, np.zeros(length, np.float32), "stop", 0) for length in lengths]
    batch = pack(samples)
    generator = torch.Generator().manual_seed(seed)
    logp = -torch.rand(len(batch), generator=generator, dtype=torch.float64) * 3
    old = logp - torch.randn(len(batch), generator=generator, dtype=torch.float64) * 0.4
    ref = logp - torch.randn(len(batch), generator=generator, dtype=torch.float64) * 0.4
    for values in (logp, old, ref):
        values[~batch.mask_T] = torch.nan
    advantage = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return batch.with_extra(old_logp=old, ref_logp=ref, advantage=batch.spread(advantage)), logp


def reference_loss(algorithm: PolicyAlgorithm, batch: Batch, logp: Tensor) -> Tensor:
    """The papers' formulas sequence by sequence, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    sequences = [n for n in range(len(batch.length_N)) if bool(((batch.seq_T == n) & batch.mask_T).any())]
    for n in sequences:
        entries = [t for t in range(len(batch)) if int(batch.seq_T[t]) == n and bool(batch.mask_T[t])]
        log_ratios = [logp[t] - batch.extra_T["old_logp"][t] for t in entries]
        advantage = batch.extra_T["advantage"][entries[0]]
        ratios = [d.exp() for d in log_ratios]
        if isinstance(algorithm, Gspo):
            ratios = [torch.stack(log_ratios).mean().exp()] * len(entries)
        low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high  # type: ignore[attr-defined]
        for t, ratio in zip(entries, ratios, strict=True):
            clipped = min(max(float(ratio.detach()), low), high)
            clips = -clipped * float(advantage) > float((-ratio * advantage).detach())
            surrogate = -clipped * advantage if clips else -ratio * advantage
            d_ref = logp[t] - batch.extra_T["ref_logp"][t]
            total = total + (surrogate + algorithm.kl_coef * ((-d_ref).exp() - 1 + d_ref)) / len(entries) / len(sequences)
    return total


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("algorithm", [Grpo(clip_low=0.2, clip_high=0.28), Gspo(), Gspo(clip_low=0.1, clip_high=0.1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_equal_the_papers_formulas(algorithm: PolicyAlgorithm, kl_coef: float, seed: int) -> None:
    algorithm = algorithm.model_copy(update={"kl_coef": kl_coef})
    batch, values = ragged_batch(seed, [1, 7, 40, 3, 12])
    entropy = torch.zeros(len(batch), dtype=torch.float64)
    logp = values.clone().requires_grad_()
    weight_T = torch.where(batch.mask_T, batch.spread(algorithm.weights(batch.count_N)), 0.0)
    loss = algorithm.loss(logp, entropy, batch, lambda x: x, algorithm.kl_coef)
    value = (loss.loss_T * weight_T).sum()
    value.backward()
    expected = values.clone().requires_grad_()
    reference = reference_loss(algorithm, batch, expected)
    reference.backward()
    assert float(value) == pytest.approx(float(reference), rel=1e-12)
    assert logp.grad is not None and expected.grad is not None
    torch.testing.assert_close(logp.grad[batch.mask_T], expected.grad[batch.mask_T], rtol=1e-12, atol=1e-15)
    assert bool((logp.grad[~batch.mask_T] == 0).all())
    assert 0 < float(loss.mean["actor/pg_clipfrac"].total) < int(loss.mean["actor/pg_clipfrac"].weight)


@pytest.mark.parametrize("algorithm", [Grpo(kl_coef=0.1), Gspo(kl_coef=0.1)])
def test_any_split_of_the_tokens_gives_the_same_loss_and_gradient(algorithm: PolicyAlgorithm) -> None:
    batch, values = ragged_batch(3, [5, 1, 30, 9])
    weight_T = torch.where(batch.mask_T, batch.spread(algorithm.weights(batch.count_N)), 0.0)
    batch = batch.with_extra(weight=weight_T)

    def gradient(parts: list[Tensor]) -> tuple[float, Tensor]:
        logp = values.clone().requires_grad_()
        pieces = [batch.take(part) for part in parts]
        sums = [piece.sequence_sum(logp[part].detach() - piece.extra_T["old_logp"]) for piece, part in zip(pieces, parts, strict=True)]
        whole = torch.stack(sums).sum(0)  # what a collective over context-parallel ranks would give
        total = torch.zeros((), dtype=torch.float64)
        for piece, part in zip(pieces, parts, strict=True):
            loss = algorithm.loss(logp[part], torch.zeros(len(part), dtype=torch.float64), piece, lambda _: whole, algorithm.kl_coef)
            total = total + (loss.loss_T * piece.extra_T["weight"]).sum()
        total.backward()
        assert logp.grad is not None
        return float(total), logp.grad

    everything = torch.arange(len(batch))
    value, grad = gradient([everything])
    zigzag = [everything[::3], everything[1::3], everything[2::3]]
    for parts in (zigzag, list(everything.split(7))):
        other, other_grad = gradient(parts)
        assert other == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(other_grad, grad, rtol=1e-12, atol=1e-15)


def test_log_ratios_of_thirty_stay_finite() -> None:
    for algorithm in (Grpo(kl_coef=0.1), Gspo(kl_coef=0.1)):
        batch, values = ragged_batch(4, [3, 3])
        for shift in (30.0, -30.0):
            extra = {**batch.extra_T, "old_logp": values - shift, "ref_logp": values - shift}
            shifted = replace(batch, extra_T={name: value.float() for name, value in extra.items()})
            logp = values.float().requires_grad_()
            loss = algorithm.loss(logp, torch.zeros(len(batch)), shifted, lambda x: x, algorithm.kl_coef)
            loss.loss_T.sum().backward()
            assert bool(loss.loss_T.isfinite().all()) and logp.grad is not None and bool(logp.grad.isfinite().all())


def test_grpo_advantages_by_hand() -> None:
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0, 0.0])
    group = torch.tensor([7, 7, 3, 3, 9, 7])  # uneven, unordered; group 3 all right, group 9 alone
    mean, std = 1 / 3, math.sqrt(((1 - 1 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    expected = torch.tensor([(1 - mean) / (std + 1e-6), -mean / (std + 1e-6), 0, 0, 0, -mean / (std + 1e-6)])
    torch.testing.assert_close(group_normalised(reward, group), expected)


def test_token_weights_by_hand() -> None:
    count = torch.tensor([2, 0, 4])
    assert token_weights(count, "token-mean").tolist() == pytest.approx([1 / 6, 0, 1 / 6])
    assert token_weights(count, "seq-mean-token-mean").tolist() == pytest.approx([1 / 4, 0, 1 / 8])
    assert token_weights(count, "seq-mean-token-sum").tolist() == pytest.approx([1 / 2, 0, 1 / 2])
    assert token_weights(count, "seq-mean-token-sum-norm", 10).tolist() == pytest.approx([1 / 20, 0, 1 / 20])
    with pytest.raises(ValueError, match="no loss token in 2 sequences"):
        token_weights(torch.zeros(2, dtype=torch.int64), "token-mean")


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    batch, values = ragged_batch(5, [4, 9])
    weight_T = torch.where(batch.mask_T, batch.spread(Sft().weights(batch.count_N)), 0.0)
    loss = Sft().loss(values, torch.zeros_like(values), batch, lambda x: x, 0.0)
    assert float((loss.loss_T * weight_T).sum()) == pytest.approx(-float(values[batch.mask_T].mean()))


def test_negative_clip_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="clip_low"):
        Grpo(clip_low=-0.1)


def test_pack_lays_out_entries_and_masks() -> None:
    first = Sample(np.array([5, 6, 7, 8], np.int32), 2, np.array([-1.0, -2.0], np.float32), "stop", 3)
    second = Sample(np.array([9, 10], np.int32), 1, np.array([-3.0], np.float32), "length", 3)
    batch = pack([first, second])
    assert batch.input_T.tolist() == [5, 6, 7, 9] and batch.target_T.tolist() == [6, 7, 8, 10]
    assert batch.mask_T.tolist() == [False, True, True, True]
    assert batch.extra_T["rollout_logp"].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert batch.position_T.tolist() == [0, 1, 2, 0] and batch.count_N.tolist() == [2, 1]
    assert len(pack([])) == 0


def test_balance_fills_every_bin_evenly() -> None:
    lengths = list(np.random.default_rng(0).integers(1, 4000, 512))
    bins = balance(lengths, 16)
    assert sorted(n for group in bins for n in group) == list(range(512))
    loads = [sum(lengths[n] for n in group) for group in bins]
    assert max(loads) / (sum(loads) / 16) < 1.002
    assert bins_needed([4, 4, 4], 8) == 2
    with pytest.raises(ValueError, match="9 tokens does not fit into a micro-batch of 8"):
        bins_needed([9], 8)
