"""The reward of a run: verifiers in processes of their own, servers, environments, the reward model on the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megarl.cluster import watch
from megarl.config import ModelReward, RewardSettings, model_of
from megarl.data.prompts import Prompt
from megarl.driver.model_groups import ModelGroups
from megarl.response import Response
from megarl.rewards.scale import RewardScale, ScoreRange, read_range
from megarl.rewards.score import Score, Scorer, ScoreRequest
from megarl.rewards.sources import open_scorer

_SCORING = threading.Lock()  # an evaluation may run while responses are scored alongside the ranks' work


@dataclass(frozen=True)
class Reward:
    """Scores responses."""

    settings: RewardSettings
    scorer: Scorer
    judge: Judge | None = None  # the reward model, whose score is the reward or a part of it
    scale: RewardScale | None = None

    @property
    def on_ranks(self) -> bool:
        """Whether the ranks also have to read the responses."""
        return self.judge is not None

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Score]:
        """Return one score per response, in order; `response.prompt` is the index of the prompt."""
        scores = self._raw(prompts, responses)
        return scores if self.scale is None else [self.scale(score) for score in scores]

    def on(self, scale: RewardScale | None) -> Reward:
        """Return the same reward on this scale."""
        return replace(self, scale=scale)

    def _raw(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Score]:
        """Score the responses. An episode whose environment failed has no score, whatever the reward is: nobody is to read it."""
        failed = [None if response.episode is None else response.episode.error for response in responses]
        played = [response for response, error in zip(responses, failed, strict=True) if error is None]
        judged = None if self.judge is None else self.judge.scores(played)
        with _SCORING:
            scores = iter(self.scorer.score(requests(prompts, played, judged)))
        return [next(scores) if error is None else Score(None, error=error) for error in failed]


@dataclass(frozen=True)
class Judge:
    """The reward model on the ranks."""

    source: ModelReward
    models: ModelGroups
    known: ScoreRange | None = None  # of its scores on the held-out pairs of its training

    def scores(self, responses: Sequence[Response]) -> list[Score]:
        """Return the reward model's score of each response."""
        scores = []
        for response, value in zip(responses, self.models.rewards(responses) if responses else [], strict=True):
            constant = None if response.finished else self.source.unfinished
            outside = {} if self.known is None else {"outside": float(constant is None and not self.known.has(value))}
            scores.append(Score(value if constant is None else constant, {"model": value, **outside}))
        return scores


@dataclass(frozen=True)
class Scorers:
    """The scoring processes of a run; they start before the models, and import their verifiers in the meantime."""

    settings: RewardSettings
    train: Scorer
    eval: Scorer

    def rewards(self, models: ModelGroups | None = None) -> tuple[Reward, Reward]:
        """Return the rewards for training and for evaluations. `models`: the ranks, which hold the reward model if there is one."""
        reward_model = model_of(self.settings.source)
        if reward_model is None or models is None:
            return Reward(self.settings, self.train), Reward(self.settings, self.eval)
        key, source = reward_model
        judge = Judge(source, models, read_range(source.path, f"{key}.path"))
        held_out = replace(judge, known=None) if self.eval is self.train else None
        return Reward(self.settings, self.train, judge), Reward(self.settings, self.eval, held_out)


@contextmanager
def open_scorers(settings: RewardSettings, note: Callable[[str], object], log: Path | None = None) -> Iterator[Scorers]:
    """Start the processes that `reward` needs for training and for evaluations, and note how well they are isolated.

    Args:
        settings: the section `reward`.
        note: prints a line.
        log: the file to which their output is appended; None: stderr.
    """
    look = partial(watch.check, "score", {})
    with ExitStack() as stack:
        train = stack.enter_context(open_scorer(settings, log, look=look))
        apart, held_out = settings.eval is not None and settings.eval != settings.source, train
        if apart:
            other = settings.model_copy(update={"source": settings.eval})
            held_out = stack.enter_context(open_scorer(other, log, "reward.eval", look))
        for guarantee in dict.fromkeys(scorer.guarantee for scorer in (train, held_out)):
            if guarantee is not None:
                note(f"responses are scored in a sandbox: {guarantee}")
        yield Scorers(settings, train, held_out)


def requests(prompts: Sequence[Prompt], responses: Sequence[Response], judged: Sequence[Score] | None = None) -> list[ScoreRequest]:
    """Return what a scorer needs of each response.

    Args:
        prompts: the prompts, indexed by `response.prompt`.
        responses: the responses to score.
        judged: the reward model's score of each, if there is a reward model.
    """

    def request(prompt: Prompt, response: Response, judgement: Score | None) -> ScoreRequest:
        earned = 0.0 if response.episode is None else response.episode.reward
        images = [placed.image for placed in prompt.images]
        return ScoreRequest(
            prompt.text, response.text, prompt.answer, prompt.meta, response.finished, earned, judgement, prompt.given, images
        )

    judgements: Sequence[Score | None] = [None] * len(responses) if judged is None else judged
    return [request(prompts[response.prompt], response, one) for response, one in zip(responses, judgements, strict=True)]
