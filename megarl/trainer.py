"""The RL loop: generate, reward, score, update, sync. Each phase is one call; what it means lies with the callee."""

from __future__ import annotations

from megarl.config import TrainConfig
from megarl.data.sampler import Sampler
from megarl.observe.metrics import merge
from megarl.observe.run import Run
from megarl.observe.signs import rollout_metrics
from megarl.rewards.score import Scorer
from megarl.stages.checks import check_gap, check_train
from megarl.stages.eval import evaluate, requests
from megarl.workers.cluster import ray_session
from megarl.workers.plan import plan_step
from megarl.workers.team import start, step_sampling


def train(config: TrainConfig) -> None:
    """Trains the policy of `config.model.path`; leaves runs/<name>/{model, metrics.jsonl, summary.json, ...}."""
    data = check_train(config)
    with (
        Run(config) as run,
        ray_session(config.cluster, actors=config.layout.ranks + config.rollout.replicas),
        Scorer(config.reward) as scorer,
    ):
        with run.phase("start"):
            ranks, engines = start(config)
        if config.model.base is not None:
            run.pass_rate("base", evaluate(data.eval, engines, scorer, run, config.seed))
        with run.phase("sync"):
            run.log(0, ranks.sync(engines, 0, config.sync))
        if config.train.eval_at_start:
            run.pass_rate("sft", evaluate(data.eval, engines, scorer, run, config.seed))

        sampler = Sampler(len(data.train), config.seed, config.data.shuffle)
        for step in range(1, config.train.steps + 1):
            prompts = [data.train[index] for index in sampler.take(config.train.prompts_per_step)]
            with run.phase("rollout"):
                responses = engines.generate(prompts, step_sampling(config, step))
            with run.phase("reward"):
                scores = scorer.score(requests(prompts, responses))
            plan = plan_step(config, responses, scores)
            metrics = rollout_metrics(responses, scores, config.rollout)
            with run.phase("old_logp"):
                metrics |= ranks.score(plan)
            if step == 1:
                check_gap(config, metrics)
            with run.phase("update"):
                metrics |= merge([ranks.update(mini_batch) for mini_batch in range(config.train.mini_batches)])
            with run.phase("sync"):
                metrics |= ranks.sync(engines, step, config.sync)
            run.log(step, metrics)
            if config.train.eval_every and step % config.train.eval_every == 0 or step == config.train.steps:
                run.pass_rate("rl", evaluate(data.eval, engines, scorer, run, config.seed), step)

        with run.phase("save"):
            ranks.save(run.directory / "model")
