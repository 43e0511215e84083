"""`megarl sft`: supervised training on response tokens, on the same ranks and layouts as the RL loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import ray
import torch

from megarl.algorithms.sft import Sft
from megarl.batch import Sample
from megarl.config import SftConfig
from megarl.data.demonstrations import Demonstration, mix
from megarl.data.sampler import Sampler
from megarl.observe.metrics import Sum
from megarl.observe.run import Run
from megarl.stages.checks import check_sft
from megarl.workers.cluster import ray_session
from megarl.workers.model_worker import ModelWorker, Objective
from megarl.workers.plan import StepPlan, split_step
from megarl.workers.team import Ranks, reserve_workers, start_ranks


def sft(config: SftConfig) -> None:
    """Trains on the demonstrations; leaves the model in runs/<name>/model."""
    clean, copied = check_sft(config)
    with Run(config) as run, ray_session(config.cluster, config.layout.ranks):
        with run.phase("start"):
            objective = Objective(Sft(), config.optimizer, config.sft.steps, temperature=1.0)
            places = reserve_workers(config, ranks=config.layout.ranks)
            ranks = Ranks(start_ranks(ModelWorker, config, config.layout, places, objective), config.cluster.phase_timeout_s)
        sampler = Sampler(len(clean), config.seed, shuffle=True)
        for step in range(1, config.sft.steps + 1):
            weak = step > config.sft.steps * (1 - config.data.corrupt_last)
            share = config.data.corrupt_copy if weak else 0.0
            chosen = mix(clean, copied, sampler.take(config.sft.batch_size), share, config.seed, step)
            with run.phase("update"):
                metrics = ranks.train(plan_batch(config, chosen))
            run.log(step, metrics | {"perf/tokens": Sum(float(sum(len(demonstration.tokens) for demonstration in chosen)))})
        with run.phase("save"):
            ranks.save(run.directory / "model")


def plan_batch(config: SftConfig, chosen: Sequence[Demonstration]) -> StepPlan:
    """The demonstrations of a step as one mini-batch."""
    samples = [
        Sample(shown.tokens, shown.prompt_length, np.zeros(len(shown.tokens) - shown.prompt_length, np.float32), "stop", 0)
        for shown in chosen
    ]
    count_N = torch.tensor([sample.response_length for sample in samples])
    lengths = [len(sample.tokens) - 1 for sample in samples]
    return StepPlan(
        payloads=[ray.put(samples)],
        place_N=[(0, index) for index in range(len(samples))],
        split=split_step(lengths, 1, config.layout.dp, config.sft.micro_batch_tokens),
        reward_N=np.zeros(len(samples), np.float32),
        group_N=np.arange(len(samples)),
        keep_N=np.ones(len(samples), bool),
        weight_N=Sft().weights(count_N).float().numpy(),
    )
