"""Requests for scores, scores, and the interface of scorers. rewards/sources.py chooses a run's scorer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from megarl.data.answers import Answer
from megarl.data.messages import Message
from megarl.errors import Stopped
from megarl.images import Image

MAX_KINDS, MAX_KIND = 16, 60
LOOK_S = 1.0

Look = Callable[[], None]
"""Called every LOOK_S seconds while scores are waited for. It may raise, as where a process of the run has been lost; scoring then ends."""


def no_look() -> None:
    """Do nothing, where there is nothing to look at."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score."""

    prompt: str
    response: str
    answer: Answer
    meta: dict[str, Any]
    finished: bool  # ended by itself, not by the length limit
    earned: float = 0.0  # the environment's rewards, summed over all turns
    judged: Score | None = None  # by the reward model on the ranks, if there is one
    given: str | list[Message] = ""  # `Prompt.given`
    images: Sequence[Image] = ()  # of the prompt, for each of which `given` has a mark


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one response, or the reason why it has none: then it takes no part in what is computed from rewards."""

    value: float | None  # None: there is no score, for the reason in `error`
    parts: dict[str, float] = field(default_factory=dict)  # what a verifier reports besides the value
    error: str | None = None  # "timeout", "abstained", "worker died: ...", "bad return: ..." or "<exception's type>: ..."
    unshaped: float | None = None  # the task's own value, if `value` also includes a punishment (megarl.rewards.shaping)
    feedback: str | None = None  # what a verifier says about the response, for a teacher to read
    scored: bool = True  # False: cut by the length limit, and scored 0 without being read (reward.require_finished)

    def __post_init__(self) -> None:
        assert (self.value is None) == (self.error is not None), "a score, or the reason why there is none"

    @classmethod
    def of(cls, value: float, parts: Mapping[str, float | str]) -> Self:
        """Make a score of what a verifier returned; texts among its parts are feedback, with ? for half a surrogate pair."""
        texts = [part.encode(errors="replace").decode() for part in parts.values() if isinstance(part, str) and part.strip()]
        numbers = {name: float(part) for name, part in parts.items() if not isinstance(part, str)}
        return cls(value, numbers, feedback="\n\n".join(texts) or None)

    @property
    def task(self) -> float | None:
        """Return the value of the response regardless of its length."""
        return self.value if self.unshaped is None else self.unshaped


class RewardUnavailable(Stopped):
    """No response can be scored. The message is one line with the settings key, the server, the attempts and the seconds they took."""


class Scorer(Protocol):
    """Scores responses. A context manager: on exit it ends all that it has started."""

    @property
    def guarantee(self) -> str | None:
        """Describe for the console what the sandbox keeps its scoring processes from, and what not; None if it has no processes."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score per request, in order; return or raise in bounded time.

        A response that cannot be judged has no score, but a `Score.error`. Raises RewardUnavailable if none can be scored.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...


def errors_by_kind(scores: Iterable[Score]) -> dict[str, int]:
    """Count the missing scores by their reason: timeout, abstained, worker died, bad return, or the exception's type.

    Kinds beyond the `MAX_KINDS` most frequent count as `other`, since a type's name may come from what a model wrote.
    """
    counts = Counter(score.error.partition(":")[0][:MAX_KIND] for score in scores if score.error is not None)
    kinds = dict(counts.most_common(MAX_KINDS))
    other = counts.total() - sum(kinds.values())
    return kinds | ({"other": other} if other else {})
