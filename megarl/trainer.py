"""The RL loop: generate, reward, score, update, sync. Each phase is one call; what it means lies with the callee."""

from __future__ import annotations

from megarl.config import TrainConfig
from megarl.data.sampler import Sampler
from megarl.observe.metrics import Last, Mean
from megarl.observe.run import Run
from megarl.stages.checks import check_train
from megarl.stages.eval import evaluate
from megarl.stages.experience import Workplace, gather
from megarl.stages.judge import open_scorers
from megarl.stages.pretraining import ValuePretraining
from megarl.workers.cluster import ray_session
from megarl.workers.team import processes, start


def train(config: TrainConfig) -> None:
    """Trains the policy of `config.model.path`; leaves runs/<name>/{model, metrics.jsonl, summary.json, ...}."""
    data = check_train(config)
    with Run(config) as run, ray_session(config.cluster, processes(config)), open_scorers(config.reward) as scorers:
        with run.phase("start"):
            team, engines = start(config)
        judge, examiner = scorers.judges(team)
        place = Workplace(config, run, team, engines, judge)
        if config.model.base is not None:
            evaluate("base", data.eval, engines, examiner, run, config.seed)
        with run.phase("sync"):
            run.log(0, team.sync(engines, 0))
        if config.train.eval_at_start:
            evaluate("sft", data.eval, engines, examiner, run, config.seed)

        sampler = Sampler(len(data.train), config.seed, config.data.shuffle)
        kl_coef = config.algorithm.kl_coef
        pretraining = ValuePretraining(config.critic)
        step = learned = 0
        while learned < config.train.steps:
            step += 1
            experience = gather(place, step, lambda count: [data.train[index] for index in sampler.take(count)], kl_coef)
            metrics, kl_N = experience.metrics, experience.kl_N
            with run.phase("update"):
                metrics |= team.learn(experience.plan, policy=not pretraining.active)
            if pretraining.active:
                pretraining.observe(metrics)
                run.log(step, metrics)
                continue
            with run.phase("sync"):
                metrics |= team.sync(engines, step)
            learned += 1
            if config.algorithm.needs_reference:
                metrics |= {"actor/kl_coef": Last(kl_coef), "actor/reference_kl": Mean(kl_N.sum(), len(kl_N))}
            run.log(step, metrics)
            kl_coef = config.algorithm.next_kl_coef(kl_coef, float(kl_N.mean()), len(kl_N))
            if config.train.eval_every and learned % config.train.eval_every == 0 or learned == config.train.steps:
                evaluate("rl", data.eval, engines, examiner, run, config.seed, step)

        with run.phase("save"):
            team.save("policy", run.directory / "model")
            if config.critic is not None:
                team.save("critic", run.directory / "critic")
