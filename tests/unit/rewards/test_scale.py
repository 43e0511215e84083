"""Normalised rewards, and the range of a reward model's scores."""

from pathlib import Path

import numpy as np
import pytest

from megarl.errors import ConfigError
from megarl.rewards.scale import RANGE_FILE, RewardScale, ScoreRange, read_range, write_range
from megarl.rewards.score import Score


def test_reference_rewards_have_mean_0_and_standard_deviation_1() -> None:
    reward_N = np.random.default_rng(1).normal(7.0, 3.0, 64).tolist()
    scale = RewardScale.of(reward_N, clip=None)
    scaled_N = [value for reward in reward_N if (value := scale(Score(reward)).value) is not None]
    assert np.mean(scaled_N) == pytest.approx(0.0, abs=1e-12) and np.std(scaled_N) == pytest.approx(1.0)
    assert RewardScale(*scale.plain()) == scale


def test_a_normalised_reward_is_clipped_and_its_raw_value_kept() -> None:
    scale = RewardScale(mean=2.0, std=0.5, clip=3.0)
    scores = [scale(Score(value, {"model": value})) for value in (2.5, 10.0, -10.0)]
    assert [score.value for score in scores] == [1.0, 3.0, -3.0]
    assert scores[1].parts == {"model": 10.0, "unnormalised": 10.0}


def test_a_missing_score_stays_missing_on_any_scale() -> None:
    scale, late = RewardScale(mean=0.4, std=0.5, clip=None), Score(None, error="timeout")
    assert scale(late) == late and scale(Score(0.0)).value == pytest.approx(-0.8)


@pytest.mark.parametrize(("value", "count"), [(0.5, 3), (0.1, 256), (-0.7, 300), (0.0, 2)])  # numpy's std of 256 times 0.1 is 1e-17
def test_equal_rewards_are_refused(value: float, count: int) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.normalise: the {count} reference responses all score {value:g}, and have no spread"):
        RewardScale.of([value] * count, None)


def test_too_few_judged_responses_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.normalise: 1 of the reference responses could be scored"):
        RewardScale.of([0.5], None)


def test_a_reward_models_score_range_round_trips(tmp_path: Path) -> None:
    assert read_range(tmp_path, "reward.source.path") is None
    write_range(tmp_path, ScoreRange(-3.5, 4.25))
    found = read_range(tmp_path, "reward.source.path")
    assert found == ScoreRange(-3.5, 4.25)
    assert [found.has(score) for score in (-3.5, 0.0, 4.25, 4.26, float("nan"))] == [True, True, True, False, False]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"lowest": 1}', '{"lowest": "a", "highest": 1}', '{"lowest": 2, "highest": 1}', '{"lowest": NaN, "highest": 1}']
)
def test_a_broken_range_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RANGE_FILE).write_text(text)
    with pytest.raises(ConfigError, match="^reward.source.path: .*scores.json: "):
        read_range(tmp_path, "reward.source.path")
