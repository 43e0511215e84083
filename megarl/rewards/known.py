"""What is known of a response before it is scored: what an environment gave, what the reward model on the ranks has said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from megarl.rewards.score import Score, ScoreRequest


class _Held:
    """Holds nothing."""

    guarantee = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing has been started."""


class EarnedScorer(_Held):
    """Takes over the rewards of environments; an episode whose environment failed scores 0."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One score a request, in their order."""
        return [Score(request.earned if request.failed is None else 0.0, {}, request.failed) for request in requests]


class JudgedScorer(_Held):
    """Takes over the scores of the reward model."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One score a request, in their order."""
        found = [request.judged for request in requests if request.judged is not None]
        assert len(found) == len(requests), "the ranks have read all responses"
        return found
