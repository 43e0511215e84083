"""Choices of tokens over a mini-batch: against plain sorting, with ties, garbage, and one to five ranks that exchange sums alone."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.selection import keys, last_key, smallest
from tests.unit.algorithms.cases import LENGTHS, make, on_ranks, ragged, same


def test_keys_are_in_the_order_of_the_numbers() -> None:
    value_T = torch.tensor([-math.inf, -1e300, -2.5, -1e-310, -0.0, 0.0, 5e-324, 1.0, 1.0 + 2**-52, math.inf], dtype=torch.float64)
    found = keys(value_T).tolist()
    assert found == sorted(found) and len(set(found)) == len(found) - 1, "only the two zeros are equal"


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 7, 60, 10**6])
def test_the_smallest_are_those_of_a_sort(ranks: int, count: int) -> None:
    """Among some; keys of few values, so that lots decide; one rank has nothing."""
    generator = torch.Generator().manual_seed(count)
    key_T = torch.randint(-3, 4, (200,), generator=generator)
    lot_T = torch.randperm(200, generator=generator)
    among_T = torch.rand(200, generator=generator) > 0.3
    owner_T = torch.randint(max(1, ranks - 1), (200,), generator=generator)
    order = sorted(among_T.nonzero().squeeze(1).tolist(), key=lambda n: (int(key_T[n]), int(lot_T[n])))
    mine = [(owner_T == rank).nonzero().squeeze(1) for rank in range(ranks)]
    parts = on_ranks(ranks, lambda rank, over: smallest(key_T[mine[rank]], lot_T[mine[rank]], among_T[mine[rank]], count, over))
    chosen = sorted(n for own, part_T in zip(mine, parts, strict=True) for n in own[part_T].tolist())
    assert chosen == sorted(order[:count])


def test_the_last_key_is_reached_with_any_sum() -> None:
    value_T = torch.tensor([3.0, 1.0, 2.0, 2.0, 9.0], dtype=torch.float64)
    for most, expected in ((0.5, []), (1.0, [1.0]), (4.0, [1.0]), (5.0, [1.0, 2.0, 2.0]), (100.0, [1.0, 2.0, 2.0, 3.0, 9.0])):

        def fits(_: float, total: float, most: float = most) -> bool:
            return total <= most

        bound = last_key(keys(value_T), value_T, fits, same)
        assert sorted(value_T[keys(value_T) <= bound].tolist()) == expected, most


def products(batch: Any, logp_T: Tensor) -> dict[int, float]:
    """The centred products of the loss tokens, by entry."""
    entries = batch.mask_T.nonzero().squeeze(1).tolist()
    lp, a = ([float(x[n]) for n in entries] for x in (logp_T, batch.extra_T["advantage"]))
    lp_mean, a_mean = math.fsum(lp) / len(lp), math.fsum(a) / len(a)
    return {n: (x - lp_mean) * (y - a_mean) for n, x, y in zip(entries, lp, a, strict=True)}


def clipped(algorithm: Any, batch: Any, logp_T: Tensor) -> set[int]:
    between = [n for n, c in products(batch, logp_T).items() if algorithm.cov_low < c < algorithm.cov_high]
    return set(sorted(between, key=lambda n: int(batch.extra_T["lot"][n]))[: math.floor(algorithm.cov_ratio * int(batch.mask_T.sum()))])


def held_back(algorithm: Any, batch: Any, logp_T: Tensor) -> set[int]:
    covariance = products(batch, logp_T)
    return set(sorted(covariance, key=lambda n: -covariance[n])[: math.floor(algorithm.cov_ratio * len(covariance))])


def masked(algorithm: Any, batch: Any, logp_T: Tensor) -> set[int]:
    """The paper's loop: while the mean square is above the threshold, the token with the largest is taken out."""
    rest = {}
    for n in batch.mask_T.nonzero().squeeze(1).tolist():
        d, advantage = float(logp_T[n] - batch.extra_T["old_logp"][n]), float(batch.extra_T["advantage"][n])
        if (advantage > 0 and d > 0) or (advantage < 0 and d < 0):
            rest[n] = d * d
    everything = set(rest)
    while rest and math.fsum(rest.values()) / len(rest) > algorithm.m2_threshold:
        del rest[max(rest, key=lambda n: rest[n])]
    return everything - rest.keys()


CHOICES: list[tuple[dict[str, Any], Callable[[Any, Any, Tensor], set[int]]]] = [
    ({"type": "clip_cov", "cov_ratio": 0.05, "cov_low": 0.1, "cov_high": 2.0}, clipped),
    ({"type": "clip_cov", "cov_ratio": 1.0, "cov_low": 1.5, "cov_high": 2.0}, clipped),
    ({"type": "kl_cov", "cov_ratio": 0.02}, held_back),
    ({"type": "m2po"}, masked),
    ({"type": "m2po", "m2_threshold": 0.1}, masked),
]


@pytest.mark.parametrize(("config", "expected"), CHOICES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_selection_is_the_papers_on_any_number_of_ranks(config: dict[str, Any], expected: Callable[..., set[int]], ranks: int) -> None:
    algorithm = make(config)
    batch, logp_T, _ = ragged(1, LENGTHS)
    chosen = expected(algorithm, batch, logp_T)
    assert 0 < len(chosen) < int(batch.mask_T.sum()) / 2
    mine = [(batch.seq_T % ranks == rank).nonzero().squeeze(1) for rank in range(ranks)]
    parts = on_ranks(ranks, lambda rank, over: algorithm.selection(logp_T[mine[rank]], batch.take(mine[rank]), over))
    assert {n for own, part_T in zip(mine, parts, strict=True) for n in own[part_T].tolist()} == chosen


def test_where_nothing_is_to_be_chosen_nothing_is() -> None:
    """Equal advantages have no covariance; on policy no token has left; a share below one token is none."""
    batch, logp_T, _ = ragged(2, LENGTHS[:20])
    flat = batch.with_extra(advantage=torch.where(batch.mask_T, 0.7, torch.nan).double())
    assert not make({"type": "clip_cov", "cov_ratio": 1.0, "cov_low": 1e-9}).selection(logp_T, flat, same).any()
    assert int(make({"type": "kl_cov", "cov_ratio": 0.1}).selection(logp_T, flat, same).sum()) == int(batch.mask_T.sum()) // 10
    assert not make({"type": "kl_cov", "cov_ratio": 1e-6}).selection(logp_T, batch, same).any()
    assert not make({"type": "m2po"}).selection(logp_T, batch.with_extra(old_logp=logp_T), same).any()
    assert not make({"type": "m2po", "m2_threshold": 100.0}).selection(logp_T, batch, same).any()
