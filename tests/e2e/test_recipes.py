"""Every runnable recipe for two steps, with one Ray session, one engine and one model rank for all of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ray

from megarl.algorithms import PolicyAlgorithm
from megarl.config import TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.data.sampler import Sampler
from megarl.observe.metrics import merge, scalars
from megarl.observe.run import Run
from megarl.rewards.score import Scorer
from megarl.stages.checks import check_train
from megarl.stages.collect import Collected, collect
from megarl.workers.cluster import ray_session
from megarl.workers.plan import StepPlan, plan_step, response_advantages
from megarl.workers.team import Engines, Ranks, start
from tests.test_recipes import CRITICS, RECIPES, names, train_config

# RLOO comes first: its KL makes the rank keep a reference. Random weights earn this reward in every degree.
RUNNABLE = ["rloo", *sorted(names(RECIPES) - CRITICS - {"rloo"})]
SMALL = """
data.train={type: reasoning_gym, dataset: spell_backward, params: {min_word_len: 3, max_word_len: 5}, seed: 7, items: 256}
data.eval={type: reasoning_gym, dataset: spell_backward, params: {min_word_len: 3, max_word_len: 5}, seed: 1000000000, items: 8}
reward.source={type: function, path: "tests.e2e.rewards:share_of_letters"}
reward.require_finished=false
optimizer.lr=1.0e-4
optimizer.warmup_steps=0
train.steps=2
train.mini_batches=2
rollout.max_response_tokens=24
"""


def small(name: str, runs: Path, model: Path) -> TrainConfig:
    """The recipe with 32 responses a step on random weights."""
    one = train_config(RECIPES / f"{name}.yaml").rollout.samples_per_prompt == 1
    sizes = ["train.prompts_per_step=32"] if one else ["train.prompts_per_step=8", "rollout.samples_per_prompt=4"]
    overrides = [*SMALL.strip().splitlines(), *sizes, f"model.path={model}", f"run_dir={runs}"]
    return load(RECIPES / f"{name}.yaml", overrides, TrainConfig)


def switch(ranks: Ranks, algorithm: PolicyAlgorithm) -> None:
    """The living rank goes on with another algorithm: what depends on it is asked anew in every call."""

    def swap(worker: Any) -> None:
        from dataclasses import replace

        worker._objective = replace(worker._objective, algorithm=algorithm)

    ray.get([actor.__ray_call__.remote(swap) for actor in ranks.group.actors])


def step(
    config: TrainConfig, number: int, prompts: list[Prompt], sampler: Sampler, ranks: Ranks, engines: Engines, scorer: Scorer, run: Run
) -> tuple[Collected, StepPlan, dict[str, float]]:
    """One step of megarl.trainer."""
    collected = collect(config, number, lambda count: [prompts[index] for index in sampler.take(count)], engines, scorer, run)
    plan = plan_step(config, collected)
    metrics = collected.metrics | ranks.score(plan)
    kl_N, kl_coef = ranks.sequence_kl(len(collected.responses)), config.algorithm.kl_coef
    ranks.advantages(response_advantages(config, plan, collected.greedy, kl_N, kl_coef), kl_coef)
    metrics |= merge([ranks.update(mini_batch) for mini_batch in plan.trained])
    metrics |= ranks.sync(engines, number, config.sync)
    return collected, plan, scalars(metrics)


def test_every_recipe_that_needs_no_critic_runs(tmp_path: Path, tiny_model: Path) -> None:
    first = small(RUNNABLE[0], tmp_path, tiny_model)
    prompts = check_train(first).train
    with ray_session(first.cluster, actors=2), Scorer(first.reward) as scorer:
        ranks, engines = start(first)
        ranks.sync(engines, 0, first.sync)
        for name in RUNNABLE:
            config = small(name, tmp_path, tiny_model)
            switch(ranks, config.algorithm)
            sampler = Sampler(len(prompts), config.seed, config.data.shuffle)
            engines = Engines(engines.group, config.rollout)
            with Run(config) as run:
                for number in (1, 2):
                    collected, plan, metrics = step(config, number, prompts, sampler, ranks, engines, scorer, run)
                    check(name, config, collected, plan, metrics)


def check(name: str, config: TrainConfig, collected: Collected, plan: StepPlan, metrics: dict[str, float]) -> None:
    assert len(collected.responses) == 32 and all(math.isfinite(value) for value in metrics.values()), name
    finished = sum(response.finished for response in collected.responses)
    assert plan.keep_N.sum() == {"raft": 8, "lite_ppo": finished}.get(name, 32)
    if plan.trained:
        assert metrics["actor/grad_norm"] > 0 and metrics["training/logprob_gap_mean"] <= 1e-5, name
        assert ("actor/kl_loss" in metrics) == (config.algorithm.kl_coef > 0 and config.algorithm.kl_in == "loss"), name
    assert (collected.greedy is not None) == (name == "remax")
    assert ("rollout/rounds" in metrics) == (name == "dapo")
