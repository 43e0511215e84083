"""The keys that a lightning indexer chooses: those of the highest scores, of equal scores the earliest."""

import pytest
import torch

from megarl.models.indexer import chosen


@pytest.mark.parametrize("keys", [1, 5, 12, 13, 40])
def test_the_chosen_keys_are_the_first_of_a_stable_sort(keys: int) -> None:
    drawn = torch.Generator().manual_seed(keys)
    score = torch.randn(60, keys, generator=drawn).relu()  # half of them are 0
    score.masked_fill_(torch.rand(60, keys, generator=drawn) < 0.3, -torch.inf)
    best = score.sort(dim=-1, descending=True, stable=True).indices[:, :12]
    assert torch.equal(chosen(score, 12), best.sort(dim=-1).values)


def test_keys_of_equal_scores_are_chosen_from_the_first_whatever_else_is_there() -> None:
    score = torch.tensor([[0.0, 2.0, 0.0, -1.0, 0.0, 1.0], [-0.0, 0.0, 3.0, 0.0, -torch.inf, -torch.inf]])
    assert chosen(score, 4).tolist() == [[0, 1, 2, 5], [0, 1, 2, 3]]
    assert chosen(score[:, :5], 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]


def test_scores_that_are_not_numbers_are_the_lowest() -> None:
    assert chosen(torch.tensor([[torch.nan, 1.0, torch.nan, 2.0], [torch.nan] * 4]), 3).tolist() == [[0, 1, 3], [0, 1, 2]]
