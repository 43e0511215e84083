"""The first half of a step, the same for every stage that learns from rollouts: responses, rewards, log-probs, values, advantages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.config import TrainConfig
from megarl.observe.metrics import Metric
from megarl.observe.run import Run
from megarl.observe.signs import rollout_metrics
from megarl.stages.checks import check_gap
from megarl.stages.collect import Draw, collect
from megarl.stages.judge import Judge
from megarl.workers.engines import Engines
from megarl.workers.plan import StepPlan
from megarl.workers.team import Team


@dataclass(frozen=True)
class Workplace:
    """What every step of a run works with."""

    config: TrainConfig
    run: Run
    team: Team
    engines: Engines
    judge: Judge


@dataclass(frozen=True)
class Experience:
    """A step that the ranks are ready to learn from."""

    plan: StepPlan
    kl_N: np.ndarray  # sum over tokens of old - ref log-prob, in nats; 0 without a reference
    metrics: dict[str, Metric]


def gather(place: Workplace, step: int, draw: Draw, kl_coef: float, *, monte_carlo: bool = False) -> Experience:
    """Samples and scores responses to the prompts that `draw` gives, and leaves them on the ranks with advantages.

    monte_carlo: for the critic alone, which is to learn what came of each token (value pretraining). RuntimeError where, in the first
    step, engines and trainer disagree about the log-probs.
    """
    config, run, team = place.config, place.run, place.team
    collected = collect(config, step, draw, place.engines, place.judge, run)
    metrics = collected.metrics | rollout_metrics(collected.responses, collected.scores)
    with run.phase("old_logp"):
        plan, scored = team.score(collected)
    if step == 1:
        check_gap(config, scored)
    with run.phase("advantage"):
        kl_N, explained = team.advantages(plan, collected.greedy, kl_coef, monte_carlo=monte_carlo)
    return Experience(plan, kl_N, metrics | scored | explained)
