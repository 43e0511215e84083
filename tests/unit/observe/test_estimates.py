"""pass@k against all choices of k responses, and intervals against what they promise."""

import math
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from megarl.observe.estimates import SetResult, estimated, normal, pass_at_k, sizes, wilson


def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one() -> None:
    for n in range(1, 8):
        for correct in range(n + 1):
            right = [index < correct for index in range(n)]
            for k in range(1, n + 1):
                assert pass_at_k(n, correct, k) == pytest.approx(fmean(map(any, combinations(right, k))), abs=1e-15)
    assert pass_at_k(256, 1, 128) == pytest.approx(0.5)  # no power of it overflows


def test_pass_at_k_does_not_depend_on_how_many_were_drawn() -> None:
    draws = np.random.default_rng(1).random((40_000, 6)) < 0.2
    estimates = [fmean(pass_at_k(6, int(row.sum()), k) for row in draws) for k in (1, 2, 4)]
    assert estimates == pytest.approx([1 - 0.8**k for k in (1, 2, 4)], abs=0.006)  # three standard errors


@pytest.mark.parametrize("trials", [1, 7, 500])
def test_wilsons_interval_holds_the_rates_that_a_score_test_does_not_reject(trials: int) -> None:
    for correct in range(0, trials + 1, max(1, trials // 10)):
        rate = correct / trials
        found = wilson(rate, trials)
        assert 0 <= found.low <= rate <= found.high <= 1
        for end in {found.low, found.high} - {0.0, 1.0}:
            assert abs(rate - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / trials), rel=1e-6)


def test_the_interval_of_a_score_holds_the_truth_in_about_95_of_100_draws() -> None:
    rng = np.random.default_rng(2)
    means = [normal(list(rng.normal(3.0, 2.0, 50))) for _ in range(2000)]
    assert 0.92 < fmean(one.low <= 3.0 <= one.high for one in means) < 0.97


def test_a_response_without_a_score_counts_in_no_statistic() -> None:
    found = estimated("a", [[1, None, 0, 0], [None] * 4, [1, 1, 1, 1]], [None, 1, 0])
    assert {name: one.value for name, one in found.estimates.items()} == pytest.approx(
        {"avg@4": (1 / 3 + 1) / 2, "pass@2": (2 / 3 + 1) / 2, "pass@4": 1.0, "greedy": 0.5}
    )
    assert found.prompts == 3 and found.rate and found.stderr == pytest.approx(1 / 3 / math.sqrt(2))
    nothing = estimated("b", [[None, None]], [None])
    assert nothing.estimates == {} and nothing.stderr is None and SetResult.read(nothing.plain()) == nothing


def test_evaluation_estimates_depend_on_the_kind_of_scores() -> None:
    rates = estimated("a", [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]], [0, 1])
    assert (rates.kind, list(rates.estimates)) == ("pass rate", ["avg@5", "pass@2", "pass@4", "pass@5", "greedy"])
    assert [one.value for one in rates.estimates.values()] == pytest.approx([0.6, 0.7, 0.9, 1.0, 0.5])
    scores = estimated("b", [[0.5, 0.0], [2.0, 1.0]])
    assert (scores.kind, list(scores.estimates), scores.estimates["avg@2"].value) == ("score", ["avg@2"], 0.875)
    assert SetResult.read(rates.plain()) == rates
    assert (sizes(1), sizes(2), sizes(8), sizes(12)) == ([], [2], [2, 4, 8], [2, 4, 8, 12])
