"""The first half of a step: prompts to scored responses, with more prompts where groups without a signal are dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megarl.config import TrainConfig
from megarl.data.prompts import Prompt
from megarl.observe.metrics import Metric, Sum
from megarl.observe.run import Run
from megarl.rewards.scale import RewardScale
from megarl.rewards.score import Score
from megarl.rewards.shaping import overlong_punishment
from megarl.rollout.engine import Sampling
from megarl.stages.judge import Judge
from megarl.workers.engines import Engines, call_seed
from megarl.workers.plan import Collected
from megarl.workers.rollout_worker import Response

Draw = Callable[[int], list[Prompt]]


@dataclass(frozen=True)
class _Group:
    """The answers to one prompt."""

    responses: list[Response]
    scores: list[Score]
    greedy: float | None

    @property
    def informative(self) -> bool:
        """Whether the answers differ in the task itself; DAPO does not ask how long they are (arXiv:2503.14476, eq. 11)."""
        return len({score.parts.get("task", score.value) for score in self.scores}) > 1


def collect(config: TrainConfig, step: int, draw: Draw, engines: Engines, judge: Judge, run: Run) -> Collected:
    """Responses to `train.prompts_per_step` prompts.

    With `train.dynamic_sampling_rounds` (DAPO) groups whose rewards are all equal are dropped and more prompts drawn until the step is
    full, at most that many times; what is then missing is filled with the first dropped groups, whose advantage is 0.
    """
    wanted, rounds = config.train.prompts_per_step, config.train.dynamic_sampling_rounds
    kept: list[_Group] = []
    spare: list[_Group] = []
    for number in range(rounds or 1):
        for group in _round(config, step, number, draw(wanted), engines, judge, run):
            (kept if rounds is None or group.informative else spare).append(group)
        if len(kept) >= wanted:
            break
    chosen = (kept + spare)[:wanted]
    metrics: dict[str, Metric] = {}
    if rounds is not None:
        metrics["rollout/rounds"] = Sum(number + 1.0)
        metrics["rollout/groups_dropped"] = Sum(float(len(kept) + len(spare) - len(chosen)))
        if len(kept) < wanted:
            metrics["events/dynamic_sampling_exhausted"] = Sum(1.0)
    return Collected(
        responses=[replace(response, prompt=index) for index, group in enumerate(chosen) for response in group.responses],
        scores=[score for group in chosen for score in group.scores],
        greedy=[group.greedy for group in chosen if group.greedy is not None] or None,
        metrics=metrics,
    )


def reference_scale(config: TrainConfig, prompts: Sequence[Prompt], engines: Engines, judge: Judge, run: Run) -> RewardScale | None:
    """The scale of `reward.normalise`, from what the engines say now; None where rewards are taken as they are."""
    settings = config.reward.normalise
    if settings is None:
        return None
    chosen = random.Random(config.seed).sample(prompts, settings.prompts)
    sampling = Sampling(1, config.rollout.temperature, config.rollout.max_response_tokens, call_seed(config.seed, 0))
    with run.phase("rollout"):
        responses = engines.generate(chosen, sampling)
    with run.phase("reward"):
        scores = judge.scores(chosen, responses)
        run.failures(scores)
    return RewardScale.of([score.value for score in scores if score.error is None], settings.clip)


def _round(config: TrainConfig, step: int, number: int, prompts: list[Prompt], engines: Engines, judge: Judge, run: Run) -> list[_Group]:
    rollout = config.rollout
    sampling = Sampling(rollout.samples_per_prompt, rollout.temperature, rollout.max_response_tokens, call_seed(config.seed, step, number))
    with run.phase("rollout"):
        responses = engines.generate(prompts, sampling)
        greedy = engines.generate(prompts, replace(sampling, n=1, temperature=0.0)) if config.algorithm.needs_greedy else []
    with run.phase("reward"):
        scores = [shaped(config, response, score) for response, score in zip(responses, judge.scores(prompts, responses), strict=True)]
        run.failures(scores)
        baselines = [shaped(config, response, score).value for response, score in zip(greedy, judge.scores(prompts, greedy), strict=True)]
    groups: list[_Group] = [_Group([], [], baselines[index] if baselines else None) for index in range(len(prompts))]
    for response, score in zip(responses, scores, strict=True):
        groups[response.prompt].responses.append(response)
        groups[response.prompt].scores.append(score)
    return groups


def shaped(config: TrainConfig, response: Response, score: Score) -> Score:
    """The score with `reward.overlong` applied; the punishment is a part of its own."""
    overlong = config.reward.overlong
    if overlong is None:
        return score
    punishment = overlong.scale * overlong_punishment(response.length, config.rollout.max_response_tokens, overlong.buffer_tokens)
    return replace(score, value=score.value + punishment, parts={**score.parts, "task": score.value, "overlong": punishment})
