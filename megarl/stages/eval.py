"""Held-out pass rates: `evaluate` inside a run, `run_eval` as the verb `megarl eval`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import pstdev

from megarl.cluster.session import ray_session
from megarl.config import ConfigError, EvalConfig, ModelReward
from megarl.data.prompts import Prompt
from megarl.environments.checks import check_environment
from megarl.observe.metrics import Last, merge
from megarl.observe.run import Run
from megarl.observe.summary import write_json
from megarl.rewards.score import Score
from megarl.rewards.sources import check as check_reward
from megarl.rollout.generate import Sampling
from megarl.stages.checks import check_engines_alone, check_prompts
from megarl.stages.reward import Reward, open_scorers
from megarl.stages.rollout_metrics import reward_failures
from megarl.workers.demand import processes
from megarl.workers.engines import Engines, call_seed, start_engines

EVAL_STEP = 0  # the draws of an evaluation do not depend on when it is made, so that evaluations compare


def evaluate(
    name: str, prompts: Sequence[Prompt], engines: Engines, reward: Reward, run: Run, seed: int, step: int = 0
) -> dict[str, float]:
    """Pass rates over the prompts: of one response each that is sampled at the rollout temperature, and of the greedy one.

    A pass rate is the mean of the scores. What is drawn does not depend on `step`.

    Args:
        name: of the weights, in the run's summary.
        prompts: the held-out ones.
        engines: with the weights.
        reward: that of evaluations.
        run: to which the rates are reported.
        seed: of the run.
        step: of the metrics' row.

    Returns:
        {"sampled": rate, "greedy": rate}.
    """
    found = dict[str, list[Score]]()
    with run.phase("eval"):
        for kind, temperature in (("sampled", engines.settings.temperature), ("greedy", 0.0)):
            sampling = Sampling(1, temperature, engines.settings.max_response_tokens, call_seed(seed, EVAL_STEP))
            responses = engines.generate(prompts, sampling)
            found[kind] = reward.scores(prompts, responses)
            run.failures(found[kind])
    rates = {kind: sum(score.value for score in scores) / len(scores) for kind, scores in found.items()}
    error = pstdev(score.value for score in found["sampled"]) / math.sqrt(len(prompts))
    failures = merge([reward_failures(scores) for scores in found.values()])
    run.pass_rate(name, rates, step, failures | {"eval/heldout/stderr": Last(error)})
    return rates


def check_eval(config: EvalConfig) -> list[Prompt]:
    """All checks of `megarl eval`; its prompts."""
    check_engines_alone(config, "eval")
    if isinstance(config.reward.source, ModelReward) and config.reward.eval is None:
        raise ConfigError("reward.source.type=reward_model: `megarl eval` has no ranks to run it on; say in reward.eval what it counts")
    check_reward(config.reward)
    check_environment(config)
    return check_prompts(config, config.data, config.rollout, config.data.eval, "data.eval")


def run_eval(config: EvalConfig) -> None:
    """`megarl eval`: leaves the pass rates of `config.model.path` in runs/<name>/eval.json."""
    prompts = check_eval(config)
    with Run(config) as run, ray_session(config.cluster, processes(config)), open_scorers(config.reward, run.note) as scorers:
        with run.phase("start"):
            engines = start_engines(config)
        rates = evaluate("eval", prompts, engines, scorers.rewards()[1], run, config.seed)
        write_json(run.directory / "eval.json", {"model": str(config.model.path), "prompts": len(prompts), **rates})
