"""The loop of the supervised stages: measure, learn step by step, measure, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.batch import Sample
from megarl.config import DpoConfig, RmConfig, SftConfig
from megarl.data.demonstrations import Demonstration
from megarl.data.preferences import Preference
from megarl.data.sampler import Sampler
from megarl.observe.metrics import Sum
from megarl.observe.run import Run
from megarl.stages.checks import Pairs
from megarl.stages.saving import Checkpoints, every, find
from megarl.workers.cluster import ray_session
from megarl.workers.learner import Goal, Learners, Lesson, MiniBatch, mini_batch, start_learners


class Course:
    """Where a supervised run stands between two steps."""

    def __init__(self, sampler: Sampler) -> None:
        self.step, self.sampler = 0, sampler

    def state(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {"step": self.step, "sampler": self.sampler.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stands where `state` was taken. ValueError where it was taken over other data."""
        self.step = state["step"]
        self.sampler.restore(state["sampler"])


def learn(
    config: SftConfig | RmConfig | DpoConfig,
    lesson: Lesson,
    items: int,
    draw: Callable[[int, list[int]], MiniBatch],
    held_out: MiniBatch | None,
) -> dict[str, float]:
    """Takes the stage's steps; leaves the model in runs/<name>/model.

    Each step's mini-batch is what `draw` makes of the step's number and its indices below `items`. `held_out` is measured before, every
    `eval_every` steps and after; returns its last numbers. Without a step to take nothing is saved: the model is as it was.
    A run of this name that was cut off goes on from its newest checkpoint, bit for bit.
    """
    settings = config.learn
    found = find(config, config.section, items) if settings.steps else None
    with Run(config, None if found is None else found.run) as run, ray_session(config.cluster, config.layout.ranks):
        with run.phase("start"):
            learners = start_learners(config, Goal(lesson, config.optimizer, settings.steps))
        course = Course(Sampler(max(1, items), config.seed, shuffle=True))
        checkpoints = Checkpoints(config, config.section, run, learners)
        if found is not None:
            checkpoints.load(found, course)
        else:
            _measure(learners, held_out, run, "held-out before" if settings.steps else "held-out", 0)
        while course.step < settings.steps:
            course.step += 1
            plan = draw(course.step, course.sampler.take(settings.batch_size))
            with run.phase("update"):
                metrics = learners.train(plan)
            run.log(course.step, metrics | {"perf/tokens": Sum(float(plan.tokens))})
            if every(settings.eval_every, course.step) or course.step == settings.steps:
                _measure(learners, held_out, run, "held-out after", course.step)
            if every(config.save.every, course.step):
                checkpoints.save(course.state())
        checkpoints.finish()
        if settings.steps:
            with run.phase("save"):
                learners.save(run.directory / "model")
        return dict(run.results.get("held-out after", {}))


def _measure(learners: Learners, held_out: MiniBatch | None, run: Run, name: str, step: int) -> None:
    if held_out is not None:
        with run.phase("eval"):
            metrics = learners.measure(held_out)
        run.held_out(name, metrics, step)


def learn_pairs(config: RmConfig | DpoConfig, lesson: Lesson, pairs: Pairs) -> dict[str, float]:
    """`learn` from pairs of responses."""

    def plan(chosen: Sequence[Preference]) -> MiniBatch:
        samples = [sample(side) for pair in chosen for side in (pair.chosen, pair.rejected)]
        margins = [pair.margin for pair in chosen for _ in range(2)]
        return mini_batch(lesson, samples, margins, config.layout.dp, config.learn.micro_batch_tokens)

    def draw(_: int, indices: list[int]) -> MiniBatch:
        return plan([pairs.train[index] for index in indices])

    return learn(config, lesson, len(pairs.train), draw, plan(pairs.held_out))


def sample(shown: Demonstration) -> Sample:
    """A response that no engine has sampled."""
    return Sample(shown.tokens, shown.prompt_length, np.zeros(len(shown.tokens) - shown.prompt_length, np.float32), "stop", 0)
