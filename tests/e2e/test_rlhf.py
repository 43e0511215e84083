"""PPO from a reward model: on the policy's ranks, on ranks of its own, and in another process over HTTP."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.tokenizer import encode, load_tokenizer, render_chats
from tests.e2e.critics import of_random_taste
from tests.e2e.job import Job
from tests.e2e.lab import Lab

SERVE = """
name: job
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false, start_timeout_s: 600, phase_timeout_s: 600}}
layout: {{ranks: 2, tp: 2}}
serve: {{port: 0, max_tokens: 32}}
"""
PPO = (
    "algorithm={type: ppo, kl_coef: 0.05, kl_target: 1.0}",
    "critic={optimizer: {lr: 0.001}}",
    "train.steps=2",
)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return of_random_taste(tiny_model, tmp_path_factory.mktemp("rm") / "model", seed=1)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> Iterator[str]:
    """Of the reward model as a service on two ranks."""
    job = Job(tmp_path_factory.mktemp("serve"), reward_model, verb="serve", template=SERVE).start()
    job.wait_for("service", lambda: " at http://" in job.text())
    yield job.text().partition(" at ")[2].split()[0]
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish() == 130


def ask(url: str, request: Any) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(request).encode())) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_served_reward_model_scores_as_transformers_does(url: str, reward_model: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(reward_model)
    texts = [(text, done) for text in ("esroh", "h", "esrohesroh") for done in (True, False)]
    status, answer = ask(url, {"samples": [{"prompt": "horse", "response": text, "finished": done} for text, done in texts]})
    assert status == 200
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    [prompt] = encode(tokenizer, render_chats(tokenizer, [[{"role": "user", "content": "horse"}]]), special=False)
    for (text, done), score in zip(texts, answer["scores"], strict=True):
        tokens = prompt + encode(tokenizer, [text], special=False)[0] + [tokenizer.eos_token_id] * done
        with torch.no_grad():
            # One sequence: the last token's score is that of the batch, whatever the padding token is.
            expected = model.score(model.model(torch.tensor([tokens])).last_hidden_state)[0, -1, 0]
        assert score == pytest.approx(float(expected), abs=1e-5)
    assert ask(url, {"samples": []}) == (200, {"scores": []})
    assert ask(url, {"samples": [{"prompt": "horse"}]})[0] == 400
    assert ask(url, {"samples": [{"prompt": "a\ud800c", "response": "c"}]})[0] == 400, "what a client sends does not end the service"
    long = ask(url, {"samples": [{"prompt": "horse", "response": "e" * 40}]})
    assert long[0] == 400 and "more than serve.max_tokens=32" in long[1]["error"]


def test_ppo_is_the_same_wherever_its_reward_model_stands(lab: Lab, tmp_path: Path, tiny_model: Path, reward_model: Path, url: str) -> None:
    sources = {
        "shared": (f"reward.source={{type: reward_model, path: {reward_model}}}",),
        "apart": (
            f"reward.source={{type: reward_model, path: {reward_model}}}",
            "placement.reward={ranks: 2, ep: 2}",
        ),
        "served": (f"reward.source={{type: http, url: '{url}'}}",),
    }
    judged = ("reward.eval={type: reasoning_gym}",)
    runs = {name: lab.run(Job(tmp_path / name, tiny_model, (*PPO, *judged, *source))).updates() for name, source in sources.items()}
    one = runs["shared"]
    assert (
        len(one) == 2 and one[0]["reward/min"] < one[0]["reward/max"] and one[0]["actor/reference_kl"] == 0 < one[1]["actor/reference_kl"]
    )
    assert one[1]["actor/kl_coef"] != one[0]["actor/kl_coef"], "the KL's weight is steered"
    for name, rows in runs.items():
        for metric in ("reward/mean", "reward/max", "critic/vf_loss", "critic/grad_norm", "actor/grad_norm"):
            assert rows[0][metric] == pytest.approx(one[0][metric], rel=5e-3, abs=1e-5), (name, metric)
    summary = json.loads((tmp_path / "shared" / "job" / "summary.json").read_text())
    assert 0 <= summary["pass_rate_rl"]["sampled"] <= 1, "evaluations count what reward.eval counts"
