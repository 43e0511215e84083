"""The groups of one step: requested, scored as they finish, and replaced if they have no signal."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megarl.config.rewards import OverlongSettings
from megarl.data.prompts import Prompt
from megarl.driver.dispatch import Dispatcher
from megarl.driver.engines import call_seed
from megarl.engines.generate import Sampling
from megarl.observe.metrics import Metric, Sum
from megarl.observe.samples import SampleRecord, record, spread
from megarl.ranks.step_plan import Group
from megarl.response import Response
from megarl.rewards.scale import RewardScale
from megarl.rewards.score import Score
from megarl.rewards.shaping import overlong_punishment
from megarl.step.context import RunContext
from megarl.step.reward import Reward

Draw = Callable[[int], Sequence[tuple[int, Prompt]]]
"""Draws this many next prompts, each with its index in data.train."""


@dataclass(frozen=True)
class StepGroups:
    """What a step learns from: its groups in the order in which they were requested, and metrics of how they were collected."""

    groups: list[Group]
    counts: dict[str, float] = field(default_factory=dict)  # metrics

    def samples(self, most: int) -> list[SampleRecord]:
        """At most `most` of the step's responses, for reading."""
        pairs = [(group.prompt, *pair) for group in self.groups for pair in zip(group.responses, group.scores, strict=True)]
        return [record(*pairs[index]) for index in spread(len(pairs), most)]

    @property
    def responses(self) -> list[Response]:
        """All responses, group by group."""
        return [response for group in self.groups for response in group.responses]

    @property
    def metrics(self) -> dict[str, Metric]:
        """How the groups were collected."""
        return {name: Sum(count) for name, count in self.counts.items()}


@dataclass
class RolloutBuffer:
    """Collects `wanted` groups of responses for a step.

    With `rounds` None, every group counts. With dynamic sampling (DAPO), up to `rounds` * `wanted` prompts may be requested: groups that
    are not informative are set aside, and another prompt is requested at once for each. The result does not depend on which group
    finishes first: no more prompts are requested, in order, than it takes to get `wanted` informative groups. If groups are still missing
    when no more may be requested, the first groups that were set aside fill the gap, with advantage 0.
    """

    wanted: int
    rounds: int | None = None
    asked: int = 0  # prompts requested so far
    _kept: dict[int, Group] = field(default_factory=dict)  # by number
    _aside: dict[int, Group] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """How many more prompts to request now."""
        return min(self.wanted + len(self._aside), self.wanted * (self.rounds or 1)) - self.asked

    @property
    def full(self) -> bool:
        """Whether all requested groups have arrived, and no more are needed or allowed."""
        return self.missing == 0 and len(self._kept) + len(self._aside) == self.asked

    def add(self, number: int, group: Group, *, informative: bool) -> None:
        """Add a group.

        Args:
            number: how many were requested before it.
            group: the group.
            informative: whether it is one of the `wanted` groups of dynamic sampling.
        """
        (self._kept if self.rounds is None or informative else self._aside)[number] = group

    def result(self) -> StepGroups:
        """The step's groups."""
        ordered = [groups[number] for groups in (self._kept, self._aside) for number in sorted(groups)][: self.wanted]
        if self.rounds is None:
            return StepGroups(ordered)
        counts = {"rollout/sampling_rounds": self.asked / self.wanted, "rollout/groups_dropped": float(self.asked - len(ordered))}
        if len(self._kept) < self.wanted:
            counts["events/dynamic_sampling_exhausted"] = 1.0
        return StepGroups(ordered, counts)


class RolloutCollector:
    """Fills the buffer of one step: requests prompts, and scores finished responses.

    Args:
        ctx: the run's context.
        draw: draws the prompts.
        step: the step that they are for; with a prompt's number within it, it determines the random draws.
        scale: the scale of the rewards, if they are normalised.
        rounds: `rounds` of the buffer.

    Attributes:
        scores: the scores of all responses so far, including those of groups that were set aside.
    """

    def __init__(self, ctx: RunContext, draw: Draw, step: int, scale: RewardScale | None, rounds: int | None = None) -> None:
        self._ctx, self._draw, self._step = ctx, draw, step
        self._reward = ctx.train_reward.on(scale)
        self.buffer = RolloutBuffer(ctx.config.train.prompts_per_step, rounds)
        self.work: Dispatcher = ctx.engines.work()
        self.scores: list[Score] = []
        self._asked: dict[int, tuple[int, Prompt]] = {}  # by number
        self._greedy: dict[int, list[Response]] = {}
        self._answers: dict[int, list[Response]] = {}  # finished, but not scored yet

    def proceed(self, finished: Callable[[Dispatcher], dict[Any, list[Response]]], *, ranks: bool) -> bool:
        """Request missing prompts, wait up to a second for responses, and score those that can be scored.

        Verifiers score finished responses while the engines generate others.

        Args:
            finished: waits for responses.
            ranks: whether the ranks are idle, so that a reward model can read the responses once all requested ones have arrived.

        Returns:
            Whether there is more to do.
        """
        self._ask()
        if self.work.open:
            for key, responses in finished(self.work).items():
                number, greedy = key
                (self._greedy if greedy else self._answers)[number] = responses
        ready = [n for n in sorted(self._answers) if n in self._greedy or not self._ctx.config.algorithm.needs_greedy]
        together = self._reward.on_ranks
        if ready and (not together or (ranks and not self.work.open)):
            phase: Callable[[str], AbstractContextManager[None]] = self._ctx.run.phase if ranks else lambda _: nullcontext()
            with phase("reward"):
                self._score(ready)
        return not self.buffer.full and (ranks or bool(self.work.open) or self.buffer.missing > 0)

    def result(self) -> StepGroups:
        """The step's groups."""
        return self.buffer.result()

    def _ask(self) -> None:
        """Request the missing prompts. A prompt's random draws depend on the step and on its number among those requested in it."""
        ctx, wanted = self._ctx, self.buffer.wanted
        rollout, engines = ctx.config.rollout, ctx.engines
        if self.buffer.missing:
            engines.take_turn()  # a reward model may just have used shared devices
        for place, prompt in self._draw(self.buffer.missing):
            number = self.buffer.asked
            seed = call_seed(ctx.config.seed, self._step, number // wanted)
            sampling = Sampling(rollout.samples_per_prompt, rollout.temperature, rollout.max_response_tokens, seed)
            self._asked[number] = place, prompt
            self.work.ask(engines.wanted((number, False), prompt, number % wanted, sampling, ctx.models.experts, self._step))
            if ctx.config.algorithm.needs_greedy:
                greedy = replace(sampling, n=1, temperature=0.0)
                self.work.ask(engines.wanted((number, True), prompt, number % wanted, greedy, step=self._step))
            self.buffer.asked += 1

    def _score(self, ready: Sequence[int]) -> None:
        places, prompts = zip(*(self._asked[number] for number in ready), strict=True)
        answers = [self._answers.pop(number) for number in ready]
        longest = self._ctx.config.rollout.max_response_tokens
        scores = scored(self._reward, prompts, answers, longest)
        self.scores += [score for group in scores for score in group]
        greedy = [self._greedy.pop(number) for number in ready] if self._ctx.config.algorithm.needs_greedy else []
        baselines = scored(self._reward, prompts, greedy, longest)
        for index, number in enumerate(ready):
            baseline = baselines[index][0].value if greedy else None
            group = Group(places[index], prompts[index], answers[index], scores[index], baseline, (self._step, number))
            self.buffer.add(number, group, informative=group.informative(self._ctx.config))


def scored(reward: Reward, prompts: Sequence[Prompt], answers: Sequence[Sequence[Response]], longest: int) -> list[list[Score]]:
    """Score responses, and shape the scores as `reward.overlong` says.

    Args:
        reward: scores the responses.
        prompts: the prompts.
        answers: the responses to each prompt.
        longest: most tokens of a response.

    Returns:
        The scores in the same shape.
    """
    responses = [replace(response, prompt=index) for index, group in enumerate(answers) for response in group]
    pairs = zip(responses, reward.scores(prompts, responses), strict=True)
    scores = iter([shaped(reward.settings.overlong, longest, *pair) for pair in pairs])
    return [[next(scores) for _ in group] for group in answers]


class InProgress(Protocol):
    """A step's groups in progress: `RolloutCollector`, `Rounds`."""

    work: Dispatcher
    scores: list[Score]

    def proceed(self, finished: Callable[[Dispatcher], dict[Any, list[Response]]], *, ranks: bool) -> bool: ...

    def result(self) -> StepGroups: ...


def finish(ctx: RunContext, progress: InProgress) -> StepGroups:
    """Finish the groups while the ranks wait, with the engines' current weights."""
    with ctx.run.phase("rollout"), ctx.engines.finishing(progress.work):
        while progress.proceed(ctx.engines.finished, ranks=True):
            pass
    ctx.run.failures(progress.scores)
    return progress.result()


def reference_scale(ctx: RunContext, prompts: Sequence[Prompt]) -> RewardScale | None:
    """Measure the scale of `reward.normalise` on responses of the current policy; None if rewards are not normalised."""
    config, settings = ctx.config, ctx.config.reward.normalise
    if settings is None:
        return None
    chosen = random.Random(config.seed).sample(prompts, settings.prompts)
    sampling = Sampling(1, config.rollout.temperature, config.rollout.max_response_tokens, call_seed(config.seed, 0))
    with ctx.run.phase("rollout"):
        responses = ctx.engines.generate(chosen, sampling)
    with ctx.run.phase("reward"):
        scores = ctx.train_reward.scores(chosen, responses)
        ctx.run.failures(scores)
    return RewardScale.of([score_.value for score_ in scores if score_.value is not None], settings.clip)


def shaped(overlong: OverlongSettings | None, longest: int, response: Response, score_: Score) -> Score:
    """Return the score with `reward.overlong` applied; the penalty is a separate part. A missing score stays missing.

    Args:
        overlong: the section `reward.overlong`.
        longest: `rollout.max_response_tokens`.
        response: the scored response.
        score_: the score before the penalty.
    """
    if overlong is None or score_.value is None:
        return score_
    punishment = overlong.scale * overlong_punishment(response.loss_tokens, longest, overlong.buffer_tokens)
    parts = {**score_.parts, "task": score_.value, "overlong": punishment}
    return replace(score_, value=score_.value + punishment, parts=parts, unshaped=score_.value)
