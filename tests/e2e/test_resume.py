"""A run that was killed goes on from its newest whole checkpoint as if nothing had been: metrics and weights, bit for bit."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.faults import PHASES, VICTIMS, Aim
from tests.e2e.job import TIMED, Job

SEED = 20
STEPS = 16  # one of them pretrains the critic
# A critic that is pretrained, a reference with an adaptive coefficient, rounds of dynamic sampling, evaluations on the way.
EVERYTHING = (
    "algorithm={type: ppo, kl_coef: 0.05, kl_target: 0.1}",
    "critic={optimizer: {lr: 0.001}, pretrain_steps: 1}",
    f"train.steps={STEPS - 1}",
    "train.dynamic_sampling_rounds=2",
    "train.eval_every=5",
    "train.eval_at_start=false",
    "save.every=1",
)


def numbers(job: Job) -> list[dict[str, Any]]:
    """Every row of the metrics, without what measures the clock."""
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in job.rows()]


def weights(job: Job, *models: str) -> dict[str, bytes]:
    """The final weights."""
    return {name: (job.runs / "job" / name / "model.safetensors").read_bytes() for name in models}


def outcome(job: Job) -> dict[str, Any]:
    """What the summary says of the run as a whole, the clock and the memory aside."""
    summary = json.loads((job.runs / "job" / "summary.json").read_text())
    return {name: value for name, value in summary.items() if name not in ("wall_s", "peak_rss_mb")}


def assert_same(job: Job, straight: Job, *models: str) -> None:
    mine, theirs = numbers(job), numbers(straight)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one == other
    assert weights(job, *models) == weights(straight, *models)
    assert outcome(job) == outcome(straight)


def gone(job: Job, within_s: float = 20) -> list[int]:
    """The processes of a job that are still there after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    return job.pids()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    """The run that is never killed."""
    return Job(tmp_path_factory.mktemp("straight"), tiny_model, EVERYTHING).run()


def test_a_run_killed_at_twelve_random_moments_is_the_run_that_was_not(straight: Job, tmp_path: Path, tiny_model: Path) -> None:
    """Each phase is hit through each victim once, in random order and at a random moment, spread over the run's steps."""
    random = np.random.default_rng(SEED)
    pairs = list(product(PHASES, VICTIMS))
    steps = [1 + (STEPS - 2) * n // len(pairs) for n in range(len(pairs))]
    aims = [Aim(pairs[n][0], pairs[n][1], step) for n, step in zip(random.permutation(len(pairs)), steps, strict=True)]
    met = []
    for aim in aims:
        job = Job(tmp_path, tiny_model, EVERYTHING).start()
        met.append(aim.hit(job, random))
        print(f"{aim}: {met[-1]}")
        assert job.finish(90) == (-9 if aim.victim == "driver" else 1), job.text()[-4000:]
        assert gone(job) == [], met[-1]
    job = Job(tmp_path, tiny_model, EVERYTHING).run()
    assert gone(job) == []
    try:
        assert_same(job, straight, "model", "critic")
    except AssertionError as error:
        raise AssertionError(f"seed {SEED}, killed:\n" + "\n".join(met)) from error
