"""The estimates that an evaluation makes on a set of prompts: avg@n and pass@k, each with its 95 % interval.

Axes: P prompts, n responses to each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, pstdev
from typing import Any

Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, with the bounds of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SetResult:
    """The numbers of one set of prompts."""

    set: str
    prompts: int
    rate: bool  # whether every score is 0 or 1, so that means are pass rates rather than mean scores
    stderr: float | None  # standard error of the sampled mean, between prompts; None: no response has a score
    estimates: Mapping[str, Estimate]  # "avg@4", "pass@2", "pass@4", "greedy"; none that no response has a score for

    @property
    def kind(self) -> str:
        return "pass rate" if self.rate else "score"

    def plain(self) -> dict[str, Any]:
        """Return the result as plain values for JSON; `SetResult.read` is the inverse."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> SetResult:
        return cls(**{**plain, "estimates": {name: Estimate(**one) for name, one in plain["estimates"].items()}})


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of `k` responses is right, from `n` responses of which `correct` are.

    1 - C(n - correct, k) / C(n, k): the share of all choices of k of the n that contain a right one (arXiv:2107.03374, eq. 1).

    Args:
        n: responses to a prompt.
        correct: how many of them are right.
        k: from 1 to n.
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def wilson(rate: float, trials: int) -> Estimate:
    """A rate with its Wilson interval.

    It is also wide enough for the mean of `trials` independent numbers between 0 and 1, since none of them varies more than a coin of that
    rate.
    """
    z2 = Z * Z / trials
    centre, half = (rate + z2 / 2) / (1 + z2), Z / (1 + z2) * math.sqrt(rate * (1 - rate) / trials + z2 / 4 / trials)
    return Estimate(rate, max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half)))


def normal(value_P: Sequence[float]) -> Estimate:
    """A mean with an interval of 1.96 standard errors on both sides."""
    mean, half = fmean(value_P), Z * _stderr(value_P)
    return Estimate(mean, mean - half, mean + half)


def estimated(set_: str, score_Pn: Sequence[Sequence[float | None]], greedy_P: Sequence[float | None] | None = None) -> SetResult:
    """Compute all numbers of a set.

    Intervals account for having drawn these prompts and no others: Wilson's if every score is 0 or 1, else the normal one of the mean.
    Each prompt's numbers are those of its responses with a score; a prompt without any, or with fewer than k for pass@k, is left out.

    Args:
        set_: the set's name.
        score_Pn: the scores of n sampled responses to each of P prompts; None: a response without a score.
        greedy_P: the scores of the greedy responses, if there are any.
    """
    n, greedy = len(score_Pn[0]), _without_none(greedy_P or [])
    scored_Pn = [scored_n for scored_n in map(_without_none, score_Pn) if scored_n]
    mean_P = [fmean(scored_n) for scored_n in scored_Pn]
    rate = all(score in (0, 1) for scored_n in [*scored_Pn, greedy] for score in scored_n)
    per_prompt = {f"avg@{n}": mean_P}
    if rate:
        for k in sizes(n):
            per_prompt[f"pass@{k}"] = [pass_at_k(len(s_n), round(sum(s_n)), k) for s_n in scored_Pn if len(s_n) >= k]
    per_prompt["greedy"] = greedy
    estimates = {name: wilson(fmean(value_P), len(value_P)) if rate else normal(value_P) for name, value_P in per_prompt.items() if value_P}
    return SetResult(set_, len(score_Pn), rate, _stderr(mean_P) if mean_P else None, estimates)


def _without_none(score_n: Sequence[float | None]) -> list[float]:
    return [score for score in score_n if score is not None]


def sizes(n: int) -> list[int]:
    """The values of k in pass@k: 2, 4, 8, ... and n."""
    return sorted({*(1 << power for power in range(1, n.bit_length()) if 1 << power < n), n} - {1})


def _stderr(value_P: Sequence[float]) -> float:
    return pstdev(value_P) / math.sqrt(len(value_P))
