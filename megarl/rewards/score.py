"""What is scored, what a score is, and what a scorer has to be. Which one a run has is decided in rewards/sources.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from megarl.errors import Stopped

MOST_KINDS, LONGEST_KIND = 16, 60


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score."""

    prompt: str
    response: str
    answer: str
    meta: dict[str, Any]
    finished: bool  # ended by itself, not by the length limit
    earned: float = 0.0  # of an environment, in all turns
    failed: str | None = None  # how the environment did
    judged: Score | None = None  # by the reward model on the ranks, where there is one


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one response."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)  # what a verifier reports beside the value
    error: str | None = None  # "timeout", "worker died: ...", "bad return: ..." or "<exception's type>: ..."; the value is 0 then
    unshaped: float | None = None  # the value of the task alone, where `value` holds more (megarl.rewards.shaping)
    scored: bool = True  # False: cut by the length limit, and scored 0 without being read (reward.require_finished)

    @property
    def task(self) -> float:
        """What the response is worth, however long it is."""
        return self.value if self.unshaped is None else self.unshaped


class RewardUnavailable(Stopped):
    """No score can be had, of any response: one line with the key, the place, the attempts and the seconds that they took."""


class Scorer(Protocol):
    """Scores responses. A context manager: what it has started ends with it."""

    @property
    def guarantee(self) -> str | None:
        """For the console: what its scoring processes are kept from, and what not; None where it has none."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One score a request, in their order; returns or raises in bounded time.

        A response that cannot be judged scores 0 with `Score.error`; RewardUnavailable where none can be, and nothing is scored then.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...


def errors_by_kind(scores: Iterable[Score]) -> dict[str, int]:
    """How many scores failed, by the kind of failure: timeout, worker died, bad return, or the exception's type.

    The kinds beyond the `MOST_KINDS` most frequent count as `other`: a type's name may come from what a model wrote.
    """
    counts = Counter(score.error.partition(":")[0][:LONGEST_KIND] for score in scores if score.error is not None)
    kinds = dict(counts.most_common(MOST_KINDS))
    other = counts.total() - sum(kinds.values())
    return kinds | ({"other": other} if other else {})
