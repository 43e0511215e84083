"""Recipes with one engine and one model rank for all of them: some for a step, with --long every runnable one for two."""

import math
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.checks.train import check_train
from megarl.config import TrainConfig, load
from megarl.driver.engines import Engines
from megarl.driver.model_groups import ModelGroups
from megarl.loops.train import train_step
from megarl.observe.metrics import Metric, scalars
from megarl.observe.restarts import Restarts
from megarl.observe.run import Run
from megarl.ranks.step_plan import StepPlan
from megarl.step.context import RunContext
from megarl.step.reward import open_scorers
from megarl.step.source import RolloutSource
from megarl.step.state import TrainState
from tests.e2e.lab import Lab
from tests.unit.examples.test_recipes import CRITICS, RECIPES, names, train_config

# RLOO comes first: its KL makes the rank keep a reference. Random weights earn this reward in every degree.
# Not among them: GDPO, which needs a reward of several parts, and Muon, which is the optimizer of a rank from its start.
RUNNABLE = ["rloo", *sorted(names(RECIPES) - CRITICS - {"rloo", "gdpo", "muon"})]
SUITE = ("rloo", "dapo", "gspo", "lite_ppo", "raft", "remax")  # of which each draws, drops or weighs samples in a way of its own
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
    sizes += ["algorithm.k=2"] if name == "pass_at_k" else []
    overrides = [*SMALL.strip().splitlines(), *sizes, f"model.path={model}", f"run_dir={runs}"]
    return load(RECIPES / f"{name}.yaml", overrides, TrainConfig)


def switch(models: ModelGroups, config: TrainConfig) -> ModelGroups:
    """The living rank goes on with another algorithm: what depends on it is asked anew in every call."""

    def swap(player: Any) -> None:
        from dataclasses import replace

        player.part._spec = replace(player.part._spec, algorithm=config.algorithm)

    ray.get([actor.__ray_call__.remote(swap) for actor in models.policy.actors])
    return ModelGroups(config, models.groups, models.experts)


def test_recipes_that_need_no_critic_run(lab: Lab, long: bool, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans, update = list[StepPlan](), ModelGroups.update

    def kept(self: ModelGroups, plan: StepPlan, *, policy: bool) -> dict[str, Metric]:
        plans.append(plan)
        return update(self, plan, policy=policy)

    monkeypatch.setattr(ModelGroups, "update", kept)
    first = small(RUNNABLE[0], tmp_path, tiny_model)
    prompts = check_train(first).train
    with open_scorers(first.reward, print) as scorers, lab.workers(first) as (models, engines):
        models.sync(engines, 0)
        for name in RUNNABLE if long else SUITE:
            config = small(name, tmp_path, tiny_model)
            models, state = switch(models, config), TrainState(config, prompts)
            with Run(config) as run:
                none = Restarts(0, run.restarted, run.note)
                ctx = RunContext(config, run, models, Engines(engines.group, config.rollout), *scorers.rewards(models), none)
                with RolloutSource(ctx, state) as source:
                    for _ in range(2 if long else 1):
                        metrics = scalars(train_step(ctx, state, source))
                        check(name, config, plans[-1], metrics)


def check(name: str, config: TrainConfig, plan: StepPlan, metrics: dict[str, float]) -> None:
    assert len(plan.keep_N) == 32 and all(math.isfinite(value) for value in metrics.values()), name
    finished = round(32 * (1 - metrics["response_length/clip_ratio"]))
    assert plan.keep_N.sum() == {"raft": 8, "lite_ppo": finished}.get(name, 32)
    if plan.trained:
        assert metrics["actor/grad_norm"] > 0 and metrics["training/logprob_gap_mean"] <= 1e-5, name
        assert ("actor/kl_loss" in metrics) == (config.algorithm.kl_coef > 0 and config.algorithm.kl_in == "loss"), name
    assert ("rollout/sampling_rounds" in metrics) == (name == "dapo")
