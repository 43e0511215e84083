"""Every runnable recipe for two steps, with one engine and one model rank for all of them."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import ray

from megarl.config import TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.data.sampler import Sampler
from megarl.observe.metrics import scalars
from megarl.observe.run import Run
from megarl.stages.checks import check_train
from megarl.stages.experience import Workplace, gather
from megarl.stages.judge import open_scorers
from megarl.workers.engines import Engines
from megarl.workers.plan import StepPlan
from megarl.workers.team import Team
from tests.e2e.lab import Lab
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
rollout.max_response_tokens=12
"""


def small(name: str, runs: Path, model: Path) -> TrainConfig:
    """The recipe with 32 responses a step on random weights."""
    one = train_config(RECIPES / f"{name}.yaml").rollout.samples_per_prompt == 1
    sizes = ["train.prompts_per_step=32"] if one else ["train.prompts_per_step=8", "rollout.samples_per_prompt=4"]
    overrides = [*SMALL.strip().splitlines(), *sizes, f"model.path={model}", f"run_dir={runs}"]
    return load(RECIPES / f"{name}.yaml", overrides, TrainConfig)


def switch(team: Team, config: TrainConfig) -> Team:
    """The living rank goes on with another algorithm: what depends on it is asked anew in every call."""

    def swap(player: Any) -> None:
        from dataclasses import replace

        player.part._spec = replace(player.part._spec, algorithm=config.algorithm)

    ray.get([actor.__ray_call__.remote(swap) for actor in team.policy.group.actors])
    return Team(config, team.groups)


def test_every_recipe_that_needs_no_critic_runs(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    first = small(RUNNABLE[0], tmp_path, tiny_model)
    prompts = check_train(first).train
    with open_scorers(first.reward) as scorers, lab.workers(first) as (team, engines):
        team.sync(engines, 0)
        for name in RUNNABLE:
            config = small(name, tmp_path, tiny_model)
            team, sampler = switch(team, config), Sampler(len(prompts), config.seed, config.data.shuffle)
            with Run(config) as run:
                place = Workplace(config, run, team, Engines(engines.group, config.rollout), scorers.judges(team)[0])
                for number in (1, 2):
                    draw = partial(take, prompts, sampler)
                    experience = gather(place, number, draw, config.algorithm.kl_coef)
                    metrics = experience.metrics | team.learn(experience.plan) | team.sync(engines, number)
                    check(name, config, experience.plan, scalars(metrics))


def take(prompts: list[Prompt], sampler: Sampler, count: int) -> list[Prompt]:
    return [prompts[index] for index in sampler.take(count)]


def check(name: str, config: TrainConfig, plan: StepPlan, metrics: dict[str, float]) -> None:
    assert len(plan.keep_N) == 32 and all(math.isfinite(value) for value in metrics.values()), name
    finished = round(32 * (1 - metrics["response_length/clip_ratio"]))
    assert plan.keep_N.sum() == {"raft": 8, "lite_ppo": finished}.get(name, 32)
    if plan.trained:
        assert metrics["actor/grad_norm"] > 0 and metrics["training/logprob_gap_mean"] <= 1e-5, name
        assert ("actor/kl_loss" in metrics) == (config.algorithm.kl_coef > 0 and config.algorithm.kl_in == "loss"), name
    assert ("rollout/rounds" in metrics) == (name == "dapo")
