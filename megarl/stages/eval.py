"""Held-out pass rates: `evaluate` inside a run, `run_eval` as the verb `megarl eval`."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import EvalConfig
from megarl.data.prompts import Prompt
from megarl.observe.run import Run
from megarl.observe.summary import write_json
from megarl.rewards.score import Scorer
from megarl.rollout.engine import Sampling
from megarl.stages.checks import check_eval
from megarl.stages.collect import requests
from megarl.workers.cluster import ray_session
from megarl.workers.team import Engines, call_seed, start_engines

EVAL_STEP = 0  # the draws of an evaluation do not depend on when it is made, so that evaluations compare


def evaluate(prompts: Sequence[Prompt], engines: Engines, scorer: Scorer, run: Run, seed: int) -> dict[str, float]:
    """Pass rate over the prompts with one response each: sampled at the rollout temperature, and greedy."""
    rates = {}
    with run.phase("eval"):
        for name, temperature in (("sampled", engines.settings.temperature), ("greedy", 0.0)):
            sampling = Sampling(1, temperature, engines.settings.max_response_tokens, call_seed(seed, EVAL_STEP))
            responses = engines.generate(prompts, sampling)
            scores = scorer.score(requests(prompts, responses))
            rates[name] = sum(score.value for score in scores) / len(scores)
    return rates


def run_eval(config: EvalConfig) -> None:
    """`megarl eval`: leaves the pass rates of `config.model.path` in runs/<name>/eval.json."""
    data = check_eval(config)
    with Run(config) as run, ray_session(config.cluster, config.rollout.replicas), Scorer(config.reward) as scorer:
        with run.phase("start"):
            engines = start_engines(config)
        rates = evaluate(data.eval, engines, scorer, run, config.seed)
        run.pass_rate("eval", rates)
        write_json(run.directory / "eval.json", {"model": str(config.model.path), "prompts": len(data.eval), **rates})
