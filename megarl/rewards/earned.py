"""What an environment gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from megarl.rewards.score import Score, ScoreRequest


class EarnedScorer:
    """Takes over the rewards of environments; an episode whose environment failed scores 0."""

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """One score a request, in their order."""
        return [Score(request.earned if request.failed is None else 0.0, {}, request.failed) for request in requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing is held."""
