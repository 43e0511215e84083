"""The RL loop: generate, reward, score, update, sync. Each phase is one call; what it means lies with the callee."""

from __future__ import annotations

from megarl.config import TrainConfig
from megarl.data.sampler import Sampler
from megarl.observe.metrics import Last, Mean, merge
from megarl.observe.run import Run
from megarl.observe.signs import rollout_metrics
from megarl.rewards.score import Scorer
from megarl.stages.checks import check_gap, check_train
from megarl.stages.collect import collect
from megarl.stages.eval import evaluate
from megarl.stages.pretraining import ValuePretraining
from megarl.workers.cluster import ray_session
from megarl.workers.plan import plan_step, response_advantages
from megarl.workers.team import start


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
            evaluate("base", data.eval, engines, scorer, run, config.seed)
        with run.phase("sync"):
            run.log(0, ranks.sync(engines, 0, config.sync))
        if config.train.eval_at_start:
            evaluate("sft", data.eval, engines, scorer, run, config.seed)

        sampler = Sampler(len(data.train), config.seed, config.data.shuffle)
        kl_coef = config.algorithm.kl_coef
        pretraining = ValuePretraining(config.critic)
        step = learned = 0
        while learned < config.train.steps:
            step += 1
            collected = collect(config, step, lambda count: [data.train[index] for index in sampler.take(count)], engines, scorer, run)
            metrics = collected.metrics | rollout_metrics(collected.responses, collected.scores)
            plan = plan_step(config, collected)
            with run.phase("old_logp"):
                metrics |= ranks.score(plan)
            if step == 1:
                check_gap(config, metrics)
            with run.phase("advantage"):
                kl_N = ranks.sequence_kl(len(collected.responses))
                metrics |= ranks.advantages(response_advantages(config, plan, collected.greedy, kl_N, kl_coef), kl_coef)
            if config.critic is not None:
                with run.phase("update_critic"):
                    metrics |= merge([ranks.update_critic(part) for _ in range(config.critic.epochs) for part in plan.trained])
            if pretraining.active:
                pretraining.observe(metrics)
                run.log(step, metrics)
                continue
            with run.phase("update"):
                metrics |= merge([ranks.update(mini_batch) for mini_batch in plan.trained])
            with run.phase("sync"):
                metrics |= ranks.sync(engines, step, config.sync)
            learned += 1
            if config.algorithm.needs_reference:
                metrics |= {"actor/kl_coef": Last(kl_coef), "actor/reference_kl": Mean(kl_N.sum(), len(kl_N))}
            run.log(step, metrics)
            kl_coef = config.algorithm.next_kl_coef(kl_coef, float(kl_N.mean()), len(kl_N))
            if config.train.eval_every and learned % config.train.eval_every == 0 or learned == config.train.steps:
                evaluate("rl", data.eval, engines, scorer, run, config.seed, step)

        with run.phase("save"):
            ranks.save(run.directory / "model")
