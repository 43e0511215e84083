"""The reward of a run: a verifier of the texts in its own processes, or the reward model on the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config import ModelReward, RewardSettings
from megarl.data.prompts import Prompt
from megarl.response import Response
from megarl.rewards.processes import ProcessScorer
from megarl.rewards.scale import RewardScale, ScoreRange, read_range
from megarl.rewards.score import Score, Scorer, ScoreRequest
from megarl.rewards.sources import open_scorer
from megarl.workers.model_groups import ModelGroups

_SCORING = threading.Lock()  # an evaluation may run while responses are scored alongside the ranks' work


@dataclass(frozen=True)
class Reward:
    """Scores responses."""

    settings: RewardSettings
    scorer: Scorer | None  # None: the reward model scores
    models: ModelGroups | None = None
    known: ScoreRange | None = None  # of the reward model's scores on the held-out pairs of its training
    scale: RewardScale | None = None

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Score]:
        """One score per response, in order; `response.prompt` is the index of the prompt."""
        scores = self._raw(prompts, responses)
        return scores if self.scale is None else [self.scale(score) for score in scores]

    def on(self, scale: RewardScale | None) -> Reward:
        """The same reward on this scale."""
        return replace(self, scale=scale)

    def _raw(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Score]:
        if self.scorer is not None:
            with _SCORING:
                return self.scorer.score(requests(prompts, responses))
        assert self.models is not None and isinstance(self.settings.source, ModelReward)
        values, cut = self.models.rewards(responses) if responses else [], self.settings.source.unfinished
        scores = []
        for response, value in zip(responses, values, strict=True):
            constant = None if response.finished else cut
            outside = {} if self.known is None else {"outside": float(constant is None and not self.known.has(value))}
            scores.append(Score(value if constant is None else constant, {"model": value, **outside}))
        return scores


@dataclass(frozen=True)
class Scorers:
    """The scoring processes of a run; they start before the models, and import their verifiers in the meantime."""

    settings: RewardSettings
    train: Scorer | None
    eval: Scorer | None

    def rewards(self, models: ModelGroups | None = None) -> tuple[Reward, Reward]:
        """The rewards for training and for evaluations."""
        source = self.settings.source
        known = read_range(source.path, "reward.source.path") if isinstance(source, ModelReward) else None
        return Reward(self.settings, self.train, models, known), Reward(self.settings, self.eval, models)


@contextmanager
def open_scorers(settings: RewardSettings, note: Callable[[str], object], log: Path | None = None) -> Iterator[Scorers]:
    """The processes that `reward` needs, for training and for evaluations; notes how well they are isolated.

    Args:
        settings: the section `reward`.
        note: prints a line.
        log: the file to which their output is appended; None: stderr.
    """
    with ExitStack() as stack:
        train = None if isinstance(settings.source, ModelReward) else stack.enter_context(open_scorer(settings, log))
        apart = settings.eval is not None and settings.eval != settings.source
        held_out = stack.enter_context(open_scorer(settings.model_copy(update={"source": settings.eval}), log)) if apart else train
        for guarantee in dict.fromkeys(scorer.guarantee for scorer in (train, held_out) if isinstance(scorer, ProcessScorer)):
            note(f"responses are scored in a sandbox: {guarantee}")
        yield Scorers(settings, train, held_out)


def requests(prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[ScoreRequest]:
    """What a verifier needs from each response."""

    def request(prompt: Prompt, response: Response) -> ScoreRequest:
        played = response.episode
        earned = (0.0, None) if played is None else (played.reward, played.error)
        return ScoreRequest(prompt.text, response.text, prompt.answer, prompt.meta, response.finished, *earned)

    return [request(prompts[response.prompt], response) for response in responses]
