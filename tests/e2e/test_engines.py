"""The RL loop's parts with another engine than vLLM: the actors, the placement, the responses, the new weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from megarl.batch import VersionSpan
from megarl.config import TrainConfig, load
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.rollout.engine import RolloutError
from megarl.rollout.generate import Sampling
from megarl.rollout.registry import ENGINES
from megarl.stages.checks import check_train
from megarl.workers.engines import start_engines
from tests.e2e.job import Job
from tests.e2e.lab import Lab
from tests.rollout.backwards_engine import PLACE, BackwardsSettings


def test_another_engine_answers_and_is_given_weights(lab: Lab, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "backwards", PLACE)
    config = load(Job(tmp_path, tiny_model).write(), [], TrainConfig)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": BackwardsSettings()})})
    prompts = check_train(config).train[:5]
    tokenizer = load_tokenizer(tiny_model)
    with lab.workers(config) as (models, _):
        engines = start_engines(config)
        models.sync(engines, 1)  # compares the fingerprints of what it has sent with those of what came
        responses = engines.generate(prompts, Sampling(2, 1.0, 64, 0))
        samples = [ray.get(response.payload) for response in responses]
        with pytest.raises(RolloutError, match=r"^engine 0: reports no routed experts; routing.sample=0 asks for none"):
            engines.generate(prompts, Sampling(2, 1.0, 64, 0), models.experts)
        ray.kill(engines.group.actors[0])
    assert [response.text for response in responses] == [
        decode(tokenizer, prompt.tokens[::-1], finished=True) for prompt in prompts for _ in range(2)
    ]
    assert {sample.weight_versions for sample in samples} == {(VersionSpan(0, 1),)}
