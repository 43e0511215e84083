"""Scales of rewards: the range of a reward model's scores, and rewards normalised by those of the starting policy.

Axes: N responses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import ConfigError
from megarl.models.hf import RANGE_FILE
from megarl.rewards.score import Score
from megarl.text.strict_json import read_json

ROUNDING = 1e-9  # rewards that differ by less than this share of their size are equal


@dataclass(frozen=True)
class ScoreRange:
    """The lowest and the highest score that a reward model gave when it was measured."""

    lowest: float
    highest: float

    def has(self, score: float) -> bool:
        return self.lowest <= score <= self.highest


def write_range(model: Path, score_range: ScoreRange) -> None:
    """Write the range into the directory of a reward model."""
    partial = model / f".{RANGE_FILE}"
    partial.write_text(json.dumps(asdict(score_range)) + "\n")
    partial.replace(model / RANGE_FILE)


def read_range(model: Path, key: str) -> ScoreRange | None:
    """Return the range in a reward model's directory; None if there is none. Raises ConfigError, starting with `key`, for a bad file."""
    path = model / RANGE_FILE
    if not path.is_file():
        return None
    try:
        fields = read_json(path, 1 << 20)
        score_range = ScoreRange(float(fields["lowest"]), float(fields["highest"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{key}: {path}: {type(error).__name__}: {error}") from None
    if not (math.isfinite(score_range.lowest) and math.isfinite(score_range.highest) and score_range.lowest <= score_range.highest):
        raise ConfigError(f"{key}: {path}: lowest={score_range.lowest:g} and highest={score_range.highest:g} are not a range")
    return score_range


@dataclass(frozen=True)
class RewardScale:
    """Normalises rewards by the mean and standard deviation of reference responses (arXiv:1909.08593, section 2.1)."""

    mean: float
    std: float
    clip: float | None  # the largest absolute value after normalisation; None: no clipping

    def __call__(self, score: Score) -> Score:
        """Return the normalised score, with the original value as its part "unnormalised"; a missing score stays missing."""
        if score.value is None:
            return score
        value = (score.value - self.mean) / self.std
        if self.clip is not None:
            value = min(max(value, -self.clip), self.clip)
        return replace(score, value=value, parts={**score.parts, "unnormalised": score.value})

    @classmethod
    def of(cls, reward_N: Sequence[float], clip: float | None) -> RewardScale:
        """Return the scale on which these rewards have mean 0 and std 1. Raises ConfigError if they are too few, or all equal."""
        if len(reward_N) < 2:
            raise ConfigError(f"reward.normalise: {len(reward_N)} of the reference responses could be scored, and at least two are needed")
        mean, std = float(np.mean(reward_N, dtype=np.float64)), float(np.std(reward_N, dtype=np.float64))
        if not std > ROUNDING * max(map(abs, reward_N)):
            raise ConfigError(f"reward.normalise: the {len(reward_N)} reference responses all score {mean:g}, and have no spread")
        return cls(mean, std, clip)

    def plain(self) -> list[Any]:
        """Return the scale as plain values for JSON; `RewardScale(*plain)` restores it."""
        return list(astuple(self))
