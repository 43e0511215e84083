"""The whole chain of weights: Megatron updates, export, transport, engine; against transformers with the exported weights."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
import torch

from megarl.checks.train import check_train
from megarl.config import TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.driver.engines import Engines
from megarl.engines.generate import Sampling
from megarl.observe.metrics import scalars
from megarl.rewards.score import Score
from tests.e2e.job import Job
from tests.e2e.lab import Lab, with_nan
from tests.e2e.rewards import share_of_letters
from tests.engines.transformers_reference import assert_greedy
from tests.groups import in_groups
from tests.rows import rows
from tools.make_tiny_model import build

SENDERS = {
    "tp2-ep2-gloo": ("layout.ranks=2", "layout.tp=2", "layout.ep=2", "sync.transport=gloo"),
    "pp2-gloo": ("layout.ranks=2", "layout.pp=2", "sync.transport=gloo"),  # two senders
    "ep2-gloo": ("layout.ranks=2", "layout.ep=2", "sync.transport=gloo"),  # two senders, one of a half of the experts
}


@pytest.mark.parametrize("layout", rows(SENDERS, ["pp2-gloo"]))
def test_after_every_sync_the_engine_answers_as_transformers_does(lab: Lab, tmp_path: Path, tiny_model: Path, layout: str) -> None:
    config = load(Job(tmp_path, tiny_model).write(), ["optimizer.lr=0.002", *SENDERS[layout]], TrainConfig)
    prompts = check_train(config).train[:8]
    seen = set()
    with lab.workers(config) as (models, engines):
        models.sync(engines, 0)
        for version in range(1, 6):
            responses = engines.generate(prompts, Sampling(4, 1.0, 12, version))
            scores = [Score(share_of_letters(prompt="", response=response.text, answer="", meta={}), {}, None) for response in responses]
            plan, metrics = models.forward(in_groups(responses, scores))
            gap = scalars(metrics)
            models.advantages(plan, None, 0.0)
            assert gap["training/logprob_gap_mean"] <= 1e-5 and gap["training/logprob_gap_max"] <= 1e-3
            models.update(plan)
            models.sync(engines, version)
            saved = tmp_path / f"version-{version}"
            models.save("policy", saved)
            seen.add(tuple(agreed_answers(saved, prompts, engines)))
    assert len(seen) >= 3, "the updates are large enough to change what the policy says"


def test_a_failing_sender_is_reported_and_the_next_run_works(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """A weight of the second stage that is not finite, which the second rank alone sees; it tells it once it has sent all."""
    senders = ("layout.ranks=2", "layout.pp=2", "sync.transport=gloo", "train.steps=1")
    name = with_nan(tiny_model, broken := tmp_path / "model")
    with pytest.raises(FloatingPointError, match=rf"^weights that are not finite: {name}\s"):
        lab.run(Job(tmp_path / "broken", broken, senders))
    lab.forget()
    [row] = lab.run(Job(tmp_path / "whole", tiny_model, senders)).steps()
    assert row["training/logprob_gap_mean"] < 1e-5


@torch.no_grad()
def agreed_answers(saved: Path, prompts: Sequence[Prompt], engines: Engines) -> list[str]:
    """The engine's greedy answers, which must be those of transformers token for token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    answers = []
    responses = engines.generate(prompts, Sampling(1, 0.0, 12, 0))
    for prompt, response in zip(prompts, responses, strict=True):
        sample = ray.get(response.payload)
        assert_greedy(model, sample.tokens[sample.prompt_length :].tolist(), prompt.tokens, 12, model.config.eos_token_id)
        answers.append(response.text)
    return answers


def test_adapters_alone_reach_the_engines(lab: Lab, tmp_path: Path) -> None:
    """Engine and trainer agree about every token after an update that moves them far; the bytes are few."""
    build(tmp_path / "model", layers=2, hidden=128, experts=8, expert_hidden=64, seed=1, family="qwen3")
    common = ("train.steps=2", "model.lora.rank=4", "optimizer.lr=0.02", "optimizer.warmup_steps=0", "layout.ranks=2", "layout.tp=2")
    sent = {}
    for name, adapters in (("merged", "false"), ("alone", "true")):
        job = lab.run(Job(tmp_path / name, tmp_path / "model", (*common, f"sync.adapters={adapters}")))
        steps = job.steps()
        gaps = [(row["training/logprob_gap_mean"], row["training/logprob_gap_max"]) for row in steps]
        assert len(gaps) == 2 and all(mean <= 1e-5 and most <= 1e-3 for mean, most in gaps), gaps
        assert steps[0]["actor/grad_norm"] > 0
        sent[name] = steps[-1]
    assert sent["alone"]["sync/mb"] < 0.2 * sent["merged"]["sync/mb"]
