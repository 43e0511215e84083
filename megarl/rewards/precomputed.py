"""Scorers of rewards that are already known: those of an environment, or of the reward model on the ranks."""

from collections.abc import Sequence
from typing import Any, Self

from megarl.rewards.score import Score, ScoreRequest


class _Held:
    """A context manager that starts nothing."""

    guarantee = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Do nothing."""


class EarnedScorer(_Held):
    """Returns the rewards of environments."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score per request, in order."""
        return [Score(request.earned) for request in requests]


class JudgedScorer(_Held):
    """Returns the scores of the reward model."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score per request, in order."""
        scores = [request.judged for request in requests if request.judged is not None]
        assert len(scores) == len(requests), "the ranks have read all responses"
        return scores
