"""Advantages over time against plain recursions in float64, on ragged sequences with holes, in any order of entries."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.gae import discounted_to_go, gae, length_adaptive_lambda, whiten
from megarl.batch import Batch

RAGGED = [*range(1, 41), 4000]


def whole(length_N: list[int], mask_T: Tensor | None = None) -> Batch:
    """Whole sequences one after the other; of a random third or more of the entries the target is a loss token."""
    length = torch.tensor(length_N, dtype=torch.int64)
    seq_T = torch.arange(len(length_N)).repeat_interleave(length)
    position_T = torch.arange(len(seq_T)) - (length.cumsum(0) - length)[seq_T]
    mask_T = torch.rand(len(seq_T), generator=torch.Generator().manual_seed(7)) < 0.7 if mask_T is None else mask_T
    count = torch.zeros_like(length).index_add(0, seq_T, mask_T.long())
    return Batch(position_T, position_T, mask_T, seq_T, position_T, length, count, torch.zeros_like(count))


def drawn(batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
    """Rewards and values in float64, NaN and huge where no loss token is."""
    generator = torch.Generator().manual_seed(seed)
    reward_T, value_T = torch.randn(2, len(batch), generator=generator, dtype=torch.float64)
    return torch.where(batch.mask_T, reward_T, torch.nan), torch.where(batch.mask_T, value_T, 1e30)


def by_hand(reward_T: Tensor, value_T: Tensor, batch: Batch, gamma: float, lam_N: list[float]) -> Tensor:
    """The definition, token by token."""
    out = torch.zeros(len(batch), dtype=torch.float64)
    for n in range(len(batch.length_N)):
        entries = [int(t) for t in (batch.mask_T & (batch.seq_T == n)).nonzero()]
        entries.sort(key=lambda t: int(batch.position_T[t]))
        following_value = following_advantage = 0.0
        for t in reversed(entries):
            delta = float(reward_T[t]) + gamma * following_value - float(value_T[t])
            following_advantage = delta + gamma * lam_N[n] * following_advantage
            following_value = float(value_T[t])
            out[t] = following_advantage
    return out


GRID = [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.999, 1.0), (1.0, 0.0), (0.0, 0.9), (0.3, 0.01), (0.99999, 0.99999)]


@pytest.mark.parametrize(("gamma", "lam"), GRID)
def test_gae_equals_the_recursion(gamma: float, lam: float) -> None:
    batch = whole(RAGGED)
    reward_T, value_T = drawn(batch, 0)
    expected = by_hand(reward_T, value_T, batch, gamma, [lam] * len(RAGGED))
    torch.testing.assert_close(gae(reward_T, value_T, batch, gamma, lam), expected, rtol=1e-11, atol=1e-11)
    single = gae(reward_T.float(), value_T.float(), batch, gamma, lam)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=2e-4, atol=2e-4)
    assert bool((single[~batch.mask_T] == 0).all())


def test_every_sequence_may_have_its_own_lambda() -> None:
    batch = whole(RAGGED)
    reward_T, value_T = drawn(batch, 1)
    lam_N = length_adaptive_lambda(batch.count_N, 0.05)
    assert float(lam_N.min()) == 0 and float(lam_N.max()) > 0.99
    expected = by_hand(reward_T, value_T, batch, 1.0, lam_N.tolist())
    torch.testing.assert_close(gae(reward_T, value_T, batch, 1.0, lam_N), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gae(reward_T.float(), value_T.float(), batch, 1.0, lam_N).double(), expected, rtol=2e-4, atol=2e-4)


def test_a_lambda_below_zero_is_the_recursion_too() -> None:
    """The literal length-adaptive lambda: -19 for a response of one token, -1 for ten."""
    batch = whole([1, 2, 5, 10, 19, 40])
    reward_T, value_T = torch.randn(2, len(batch), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lam_N = length_adaptive_lambda(batch.count_N, 0.05, None)
    assert lam_N.tolist() == pytest.approx([1 - 20 / count for count in batch.count_N.tolist()])
    found_T = gae(reward_T, value_T, batch, 1.0, lam_N, least=-math.inf)
    torch.testing.assert_close(found_T, by_hand(reward_T, value_T, batch, 1.0, lam_N.tolist()), rtol=1e-10, atol=1e-10)


def test_length_adaptive_lambda_by_hand() -> None:
    assert length_adaptive_lambda(torch.tensor([0, 1, 40]), 0.05, None).tolist() == pytest.approx([0, -19, 0.5])
    assert length_adaptive_lambda(torch.tensor([0, 1, 19, 20, 40, 2000]), 0.05).tolist() == pytest.approx([0, 0, 0, 0, 0.5, 0.99])
    with pytest.raises(ValueError, match="alpha is 0, must be above 0"):
        length_adaptive_lambda(torch.tensor([3]), 0.0)


def test_extreme_lambdas_are_exact_in_float32() -> None:
    """gamma lam = 1: rewards to go less the value; lam = 0: one step's error. 0/1 rewards have exact sums, so nothing may be lost."""
    batch = whole([32768, 3, 5000])
    reward_T = (torch.rand(len(batch)) < 0.5).float()
    value_T = torch.randn(len(batch))
    ones = gae(reward_T, value_T, batch, 1.0, 1.0)
    to_go = discounted_to_go(reward_T, batch, 1.0)
    assert torch.equal(ones[batch.mask_T], (to_go - value_T)[batch.mask_T])
    used = batch.mask_T.nonzero().squeeze(1)
    same_sequence = (batch.seq_T[used][1:] == batch.seq_T[used][:-1]).float()
    after = torch.cat([value_T[used][1:] * same_sequence, torch.zeros(1)])
    zeros = gae(reward_T, value_T, batch, 1.0, 0.0)[used]
    assert torch.equal(zeros, reward_T[used] + after - value_T[used])


@pytest.mark.parametrize("decay", [1e-30, 0.01, 0.5, 0.95, 0.9995, 0.99997, 1.0])
def test_long_sequences_neither_overflow_nor_fade(decay: float) -> None:
    batch = whole([32768, 200_000], torch.ones(232_768, dtype=torch.bool))
    reward_T, value_T = drawn(batch, 2)
    expected = discounted_to_go(reward_T, batch, decay)
    last = int(batch.length_N[0]) - 1
    powers = decay ** torch.arange(last + 1, dtype=torch.float64)
    assert float(expected[0]) == pytest.approx(float((powers * reward_T[: last + 1]).sum()), rel=1e-10)
    single = discounted_to_go(reward_T.float(), batch, decay)
    torch.testing.assert_close(single.double(), expected, rtol=2e-4, atol=2e-4)
    both = gae(reward_T.float(), value_T.float(), batch, decay, 1.0).double()
    torch.testing.assert_close(both, gae(reward_T, value_T, batch, decay, 1.0), rtol=2e-4, atol=2e-4)


def test_order_of_entries_does_not_matter() -> None:
    batch = whole([5, 1, 17, 9])
    reward_T, value_T = drawn(batch, 3)
    expected = gae(reward_T, value_T, batch, 0.99, 0.9)
    torch.testing.assert_close(gae(reward_T, value_T, replace(batch, in_order=True), 0.99, 0.9), expected, rtol=0, atol=0)
    shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(1))
    later_sequences = (batch.seq_T >= 2).nonzero().squeeze(1)
    swapped = torch.argsort(-batch.seq_T, stable=True)
    for index in (shuffled, later_sequences, swapped):
        part = gae(reward_T[index], value_T[index], batch.take(index), 0.99, 0.9)
        torch.testing.assert_close(part, expected[index], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            discounted_to_go(reward_T[index], batch.take(index), 0.9), discounted_to_go(reward_T, batch, 0.9)[index], rtol=1e-12, atol=1e-12
        )


def test_sequences_cut_in_two_are_refused() -> None:
    batch = whole([5, 4])
    zeros = torch.zeros(8)
    with pytest.raises(ValueError, match="sequence 1 has 3 of its 4 entries"):
        gae(zeros, zeros, batch.take(torch.arange(8)), 1.0, 1.0)
    with pytest.raises(ValueError, match="an entry is there twice"):
        gae(torch.zeros(9), torch.zeros(9), batch.take(torch.tensor([0, 1, 2, 2, 4, 5, 6, 7, 8])), 1.0, 1.0)


def test_bad_settings_are_refused() -> None:
    batch = whole([3])
    zeros = torch.zeros(3)
    with pytest.raises(ValueError, match=r"gamma is 1.1, must be from 0 to 1"):
        gae(zeros, zeros, batch, 1.1, 1.0)
    with pytest.raises(ValueError, match=r"lam is -0.5, must be from 0 to 1"):
        gae(zeros, zeros, batch, 1.0, torch.tensor([-0.5]))
    with pytest.raises(ValueError, match=r"lam has shape \[2\] for 1 sequences"):
        gae(zeros, zeros, batch, 1.0, torch.tensor([0.5, 0.5]))


def test_empty_bag_has_no_advantages() -> None:
    empty = whole([3]).take(torch.empty(0, dtype=torch.int64))
    assert len(gae(torch.empty(0), torch.empty(0), empty, 1.0, 1.0)) == 0 and len(discounted_to_go(torch.empty(0), empty, 1.0)) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_any_lengths_and_masks(length_N: list[int], gamma: float, lam: float, seed: int) -> None:
    mask_T = torch.rand(sum(length_N), generator=torch.Generator().manual_seed(seed)) < 0.6
    batch = whole(length_N, mask_T)
    reward_T, value_T = drawn(batch, seed)
    expected = by_hand(reward_T, value_T, batch, gamma, [lam] * len(length_N))
    torch.testing.assert_close(gae(reward_T, value_T, batch, gamma, lam), expected, rtol=1e-10, atol=1e-10)
    plain = by_hand(reward_T, torch.zeros_like(value_T), batch, gamma, [1.0] * len(length_N))
    torch.testing.assert_close(discounted_to_go(reward_T, batch, gamma), plain, rtol=1e-10, atol=1e-10)


def test_whitened_tokens_have_mean_0_and_variance_1_over_all_ranks() -> None:
    batch = whole([40, 9, 300])
    value_T = drawn(batch, 4)[1]
    kept = value_T[batch.mask_T]
    expected = torch.where(batch.mask_T, (value_T - kept.mean()) / math.sqrt(float(kept.var()) + 1e-8), 0.0)
    torch.testing.assert_close(whiten(value_T, batch.mask_T, lambda x: x), expected, rtol=1e-12, atol=1e-12)
    parts = [torch.arange(start, len(batch), 3) for start in range(3)]
    for part in parts:
        got = whiten(value_T[part], batch.mask_T[part], _other_ranks([(value_T[p], batch.mask_T[p]) for p in parts]))
        torch.testing.assert_close(got, expected[part], rtol=1e-12, atol=1e-12)


def _other_ranks(parts: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
    """What a sum over ranks would give to `whiten`: count and total first, then the squares about the mean."""
    kept = torch.cat([value[mask] for value, mask in parts])

    def sum_over(local: Tensor) -> Tensor:
        if local.ndim:
            return torch.tensor([float(len(kept)), float(kept.sum())], dtype=torch.float64)
        return (kept - kept.mean()).square().sum()

    return sum_over


def test_whitening_one_token_or_none_gives_zero() -> None:
    one = whiten(torch.tensor([3.0, torch.nan]), torch.tensor([True, False]), lambda x: x)
    none = whiten(torch.tensor([torch.nan]), torch.tensor([False]), lambda x: x)
    assert one.tolist() == [0.0, 0.0] and none.tolist() == [0.0]
