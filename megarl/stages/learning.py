"""The loop of the supervised stages: measure, learn step by step, measure, save."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megarl.batch import Sample
from megarl.config import DpoConfig, RmConfig, SftConfig
from megarl.data.demonstrations import Demonstration
from megarl.data.preferences import Preference
from megarl.data.sampler import Sampler
from megarl.observe.metrics import Sum
from megarl.observe.run import Run
from megarl.stages.checks import Pairs
from megarl.workers.cluster import ray_session
from megarl.workers.learner import Goal, Learners, Lesson, MiniBatch, mini_batch, start_learners


def learn(config: SftConfig | RmConfig | DpoConfig, lesson: Lesson, draw: Callable[[int], MiniBatch], held_out: MiniBatch | None) -> None:
    """Takes the stage's steps on the mini-batches that `draw` gives for each; leaves the model in runs/<name>/model.

    `held_out` is measured before, every `eval_every` steps and after. Without a step to take nothing is saved: the model is as it was.
    """
    settings = config.learn
    with Run(config) as run, ray_session(config.cluster, config.layout.ranks):
        with run.phase("start"):
            learners = start_learners(config, Goal(lesson, config.optimizer, settings.steps))
        _measure(learners, held_out, run, "held-out before" if settings.steps else "held-out", 0)
        for step in range(1, settings.steps + 1):
            plan = draw(step)
            with run.phase("update"):
                metrics = learners.train(plan)
            run.log(step, metrics | {"perf/tokens": Sum(float(plan.tokens))})
            if settings.eval_every and step % settings.eval_every == 0 or step == settings.steps:
                _measure(learners, held_out, run, "held-out after", step)
        if settings.steps:
            with run.phase("save"):
                learners.save(run.directory / "model")


def _measure(learners: Learners, held_out: MiniBatch | None, run: Run, name: str, step: int) -> None:
    if held_out is not None:
        with run.phase("eval"):
            metrics = learners.measure(held_out)
        run.held_out(name, metrics, step)


def learn_pairs(config: RmConfig | DpoConfig, lesson: Lesson, pairs: Pairs) -> None:
    """`learn` from pairs of responses."""

    def plan(chosen: Sequence[Preference]) -> MiniBatch:
        samples = [sample(side) for pair in chosen for side in (pair.chosen, pair.rejected)]
        margins = [pair.margin for pair in chosen for _ in range(2)]
        return mini_batch(lesson, samples, margins, config.layout.dp, config.learn.micro_batch_tokens)

    sampler = Sampler(max(1, len(pairs.train)), config.seed, shuffle=True)
    learn(config, lesson, lambda _: plan([pairs.train[index] for index in sampler.take(config.learn.batch_size)]), plan(pairs.held_out))


def sample(shown: Demonstration) -> Sample:
    """A response that no engine has sampled."""
    return Sample(shown.tokens, shown.prompt_length, np.zeros(len(shown.tokens) - shown.prompt_length, np.float32), "stop", 0)
