"""The first half of a step: prompts to scored responses, with more prompts where groups without a signal are dropped."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megarl.config import TrainConfig
from megarl.data.prompts import Prompt
from megarl.observe.metrics import Metric, Sum
from megarl.observe.samples import Record, record, spread
from megarl.rewards.scale import RewardScale
from megarl.rewards.score import Score
from megarl.rewards.shaping import overlong_punishment
from megarl.rollout.generate import Sampling
from megarl.stages.context import RunContext
from megarl.workers.engines import call_seed
from megarl.workers.plan import RolloutBatch
from megarl.workers.rollout_worker import Response


@dataclass(frozen=True)
class Generated:
    """Responses to some prompts; `response.prompt` counts the prompts."""

    prompts: Sequence[Prompt]
    responses: Sequence[Response]
    greedy: Sequence[Response]  # ReMax: the greedy response to each prompt; else empty


@dataclass(frozen=True)
class Group:
    """The scored responses to one prompt."""

    prompt: Prompt
    responses: list[Response]
    scores: list[Score]
    greedy: float | None  # the reward of the greedy response

    @property
    def informative(self) -> bool:
        """Whether the responses differ in the task itself; DAPO does not ask how long they are (arXiv:2503.14476, eq. 11)."""
        return len({score.task for score in self.scores}) > 1


def generate(ctx: RunContext, prompts: Sequence[Prompt], step: int, round_: int = 0) -> Generated:
    """Samples `rollout.samples_per_prompt` responses to each prompt from the engines.

    Args:
        prompts: what is asked.
        step: the step that they are for; with `round_`, the sampling round in it, it decides the random draws.
    """
    rollout = ctx.config.rollout
    seed = call_seed(ctx.config.seed, step, round_)
    sampling = Sampling(rollout.samples_per_prompt, rollout.temperature, rollout.max_response_tokens, seed)
    with ctx.run.phase("rollout"):
        responses = ctx.engines.generate(prompts, sampling, ctx.models.experts)
        needs_greedy = ctx.config.algorithm.needs_greedy
        greedy = ctx.engines.generate(prompts, replace(sampling, n=1, temperature=0.0)) if needs_greedy else []
    return Generated(prompts, responses, greedy)


def score(ctx: RunContext, generated: Generated, scale: RewardScale | None) -> list[Group]:
    """The reward of every response, prompt by prompt.

    Args:
        ctx: has the run's reward.
        generated: the responses.
        scale: the run's reward scale; None: rewards are taken as they are.

    Returns:
        A group for each prompt, in their order.
    """
    reward, prompts = ctx.train_reward.on(scale), generated.prompts

    def scores(responses: Sequence[Response]) -> list[Score]:
        return [shaped(ctx.config, *pair) for pair in zip(responses, reward.scores(prompts, responses), strict=True)]

    with ctx.run.phase("reward"):
        found = scores(generated.responses)
        ctx.run.failures(found)
        greedy = scores(generated.greedy)
    groups = [Group(prompt, [], [], greedy[index].value if greedy else None) for index, prompt in enumerate(prompts)]
    for response, score_ in zip(generated.responses, found, strict=True):
        groups[response.prompt].responses.append(response)
        groups[response.prompt].scores.append(score_)
    return groups


@dataclass
class RolloutBuffer:
    """Collects `wanted` groups of responses for a step.

    rounds: with dynamic sampling (DAPO), the most rounds of sampling. Groups whose rewards are all equal are then set aside, and more
    prompts are asked until the step is full; what is missing after the last round is filled with the first groups that were set aside,
    whose advantage is 0. None: one round, and every group counts.
    """

    wanted: int
    rounds: int | None = None
    round: int = 0  # rounds so far
    _kept: list[Group] = field(default_factory=list)
    _uninformative: list[Group] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether no further round is needed, or allowed."""
        return len(self._kept) >= self.wanted or self.round >= (self.rounds or 1)

    def add(self, groups: Sequence[Group]) -> None:
        """Takes a round's groups."""
        self.round += 1
        for group in groups:
            (self._kept if self.rounds is None or group.informative else self._uninformative).append(group)

    @property
    def chosen(self) -> list[Group]:
        """The step's groups."""
        return (self._kept + self._uninformative)[: self.wanted]

    def samples(self, most: int) -> list[Record]:
        """At most so many of the step's responses, to read."""
        pairs = [(group.prompt, *pair) for group in self.chosen for pair in zip(group.responses, group.scores, strict=True)]
        return [record(*pairs[index]) for index in spread(len(pairs), most)]

    def batch(self) -> RolloutBatch:
        """The step's responses, prompts counted anew, and how dynamic sampling went."""
        chosen = self.chosen
        metrics: dict[str, Metric] = {}
        if self.rounds is not None:
            metrics["rollout/rounds"] = Sum(float(self.round))
            metrics["rollout/groups_dropped"] = Sum(float(len(self._kept) + len(self._uninformative) - len(chosen)))
            if len(self._kept) < self.wanted:
                metrics["events/dynamic_sampling_exhausted"] = Sum(1.0)
        return RolloutBatch(
            responses=[replace(response, prompt=index) for index, group in enumerate(chosen) for response in group.responses],
            scores=[score_ for group in chosen for score_ in group.scores],
            greedy=[group.greedy for group in chosen if group.greedy is not None] or None,
            metrics=metrics,
        )


def reference_scale(ctx: RunContext, prompts: Sequence[Prompt]) -> RewardScale | None:
    """The scale of `reward.normalise`, from responses of the policy as it is now; None where rewards are taken as they are."""
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
    return RewardScale.of([score_.value for score_ in scores if score_.error is None], settings.clip)


def shaped(config: TrainConfig, response: Response, score_: Score) -> Score:
    """The score with `reward.overlong` applied; the punishment is a part of its own."""
    overlong = config.reward.overlong
    if overlong is None:
        return score_
    punishment = overlong.scale * overlong_punishment(response.loss_tokens, config.rollout.max_response_tokens, overlong.buffer_tokens)
    parts = {**score_.parts, "task": score_.value, "overlong": punishment}
    return replace(score_, value=score_.value + punishment, parts=parts, unshaped=score_.value)
