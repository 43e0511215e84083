"""The weighted sum of several rewards."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from megarl.config.rewards import RewardPart
from megarl.rewards.processes import ProcessScorer
from megarl.rewards.score import Score, Scorer, ScoreRequest
from megarl.rewards.verifiers import LARGEST


class SumScorer:
    """Adds up the weighted scores of its parts, each of which scores as it would alone.

    Args:
        verifiers: returns the weighted sum of the parts that run in scoring processes; None if there are none.
        others: all other parts, each with its scorer.
    """

    def __init__(self, verifiers: ProcessScorer | None, others: Sequence[tuple[RewardPart, Scorer]]) -> None:
        self._verifiers, self._others, self._opened = verifiers, others, ExitStack()

    @property
    def guarantee(self) -> str | None:
        """Return the guarantee of the scoring processes; None without any."""
        return None if self._verifiers is None else self._verifiers.guarantee

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score per request, in order. Raises whatever a part raises."""
        columns = [] if self._verifiers is None else [self._verifiers.score(requests)]
        columns += [[_named(part, score) for score in scorer.score(requests)] for part, scorer in self._others]
        return [_added(scores) for scores in zip(*columns, strict=True)]

    def __enter__(self) -> Self:
        for scorer in (self._verifiers, *(scorer for _, scorer in self._others)):
            if scorer is not None:
                self._opened.enter_context(scorer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()


def _named(part: RewardPart, score: Score) -> Score:
    """Weight a part's score, and name its value and parts after the part."""
    if score.value is None or not score.scored:
        return score
    parts = {part.name: score.value} | {f"{part.name}/{key}": number for key, number in score.parts.items()}
    return Score(part.weight * score.value, parts, feedback=score.feedback)


def _added(scores: Sequence[Score]) -> Score:
    """Add up one response's scores. If one of them is missing, so is the sum; parts with `scored` False add 0."""
    values = [score.value for score in scores if score.value is not None]
    if len(values) < len(scores):
        return next(score for score in scores if score.value is None)
    total = sum(values)
    if abs(total) > LARGEST:
        return Score(None, error=f"bad return: the weighted sum is {total:g}, and beyond {LARGEST:g} nothing is taken")
    parts = {name: value for score in scores for name, value in score.parts.items()}
    feedback = "\n\n".join(score.feedback for score in scores if score.feedback is not None) or None
    return Score(total, parts, feedback=feedback, scored=any(score.scored for score in scores))
