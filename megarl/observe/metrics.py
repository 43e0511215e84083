"""Metrics that declare their own reduction, so that a number is the same on any layout.

A rank reports accumulators of plain floats (picklable, without torch), `merge` combines those of ranks and micro-batches in any grouping,
and `scalars` reads the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Self


@dataclass(frozen=True)
class Sums:
    """Sums that are added field by field."""

    def merge(self, other: Self) -> Self:
        return replace(self, **{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Mean(Sums):
    """A weighted mean: `total` is the weighted sum, `weight` the sum of the weights. With weight 0 it has no value."""

    total: float
    weight: float

    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True)
class Std(Sums):
    """The standard deviation (divided by the weight, not by weight - 1) from the weighted sums of x and x^2."""

    total: float
    square: float
    weight: float

    def value(self) -> float | None:
        if not self.weight:
            return None
        variance = self.square / self.weight - (self.total / self.weight) ** 2
        return math.sqrt(variance) if not variance < 0 else 0.0  # rounding may leave it below 0; nan stays nan


@dataclass(frozen=True)
class SampleShare(Sums):
    """The effective sample size of weights, as a share of their count: (sum of w)^2 / (count * sum of w^2). No value if all are 0."""

    total: float
    square: float
    count: float

    def value(self) -> float | None:
        return self.total**2 / (self.count * self.square) if self.square else None


@dataclass(frozen=True)
class Sum(Sums):
    """A count or an extensive quantity."""

    total: float

    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    """The largest value; a single nan makes it nan, whatever the order."""

    peak: float

    def merge(self, other: Max) -> Max:
        return Max(math.nan if math.isnan(self.peak) or math.isnan(other.peak) else max(self.peak, other.peak))

    def value(self) -> float:
        return self.peak


@dataclass(frozen=True)
class Min:
    """The smallest value; a single nan makes it nan, whatever the order."""

    peak: float

    def merge(self, other: Min) -> Min:
        return Min(math.nan if math.isnan(self.peak) or math.isnan(other.peak) else min(self.peak, other.peak))

    def value(self) -> float:
        return self.peak


@dataclass(frozen=True)
class Last:
    """The value reported last, in the order in which reports are merged."""

    last: float

    def merge(self, other: Last) -> Last:
        return other

    def value(self) -> float:
        return self.last


@dataclass(frozen=True)
class Explained(Sums):
    """Explained variance, 1 - Var(goal - guess) / Var(goal), from sums of goal, goal^2, error = goal - guess and error^2."""

    count: float
    goal: float
    goal_square: float
    error: float
    error_square: float

    def value(self) -> float | None:
        if not self.count:
            return None
        variance = self.goal_square / self.count - (self.goal / self.count) ** 2
        if variance <= 1e-12 * self.goal_square / self.count:
            return None  # the goal does not vary: there is nothing to explain
        return 1 - (self.error_square / self.count - (self.error / self.count) ** 2) / variance


@dataclass(frozen=True)
class GroupBias:
    """What the mean error in each group (each position, say) costs a guess, compared with a constant guess.

    It is (Var_g(error) - Var_g(goal)) / Var(goal), where Var_g is the variance between the groups' means, weighted by their counts: the
    part of explained variance that lies between groups, with the opposite sign. It is 0 for any constant guess, however wrong; below 0 if
    the guess follows the groups' goals; above 0, without bound, if the guess differs by group and the goals do not.

    `groups` holds, for each group, the count, the sum of goal and the sum of error = goal - guess.
    """

    groups: tuple[tuple[float, float, float], ...]
    goal_square: float  # sum of goal^2 over all groups

    def merge(self, other: GroupBias) -> GroupBias:
        nothing = (0.0, 0.0, 0.0)
        pairs = zip_longest(self.groups, other.groups, fillvalue=nothing)
        groups = tuple((a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs)
        return GroupBias(groups, self.goal_square + other.goal_square)

    def value(self) -> float | None:
        count, goal, error = (math.fsum(group[k] for group in self.groups) for k in range(3))
        if not count:
            return None
        variance = self.goal_square / count - (goal / count) ** 2
        if variance <= 1e-12 * self.goal_square / count:
            return None  # as in `Explained`

        def between(k: int, mean: float) -> float:
            return math.fsum(group[0] / count * (group[k] / group[0] - mean) ** 2 for group in self.groups if group[0])

        return (between(2, error / count) - between(1, goal / count)) / variance


Metric = Mean | Std | SampleShare | Sum | Max | Min | Last | Explained | GroupBias


def merge(reports: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge all reports into one. A name with two different reductions is a bug in megarl (AssertionError with the name)."""
    merged: dict[str, Metric] = {}
    for report in reports:
        for name, metric in report.items():
            total = merged.get(name)
            if total is None:
                merged[name] = metric
            else:
                assert type(total) is type(metric), f"{name}: {type(total).__name__} merged with {type(metric).__name__}"
                merged[name] = total.merge(metric)  # type: ignore[arg-type]  # the same class, as just asserted
    return merged


def scalars(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the value of every metric that has one (a mean over nothing has none)."""
    values = ((name, metric.value()) for name, metric in metrics.items())
    return {name: value for name, value in values if value is not None}
