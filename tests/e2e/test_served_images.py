"""A reward model that sees images, as a service: its scores are those of transformers, of prompts with none to three images."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.config import FileSource, HttpReward, ModelSettings, SourceFormat
from megarl.data.images import reader_of
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import encode, load_tokenizer
from megarl.models.image_processor import ImageProcessor
from megarl.response import Response
from megarl.rewards.http import HttpScorer
from megarl.step.reward import requests
from tests.e2e.job import Job
from tests.e2e.test_images import conversations, seen
from tests.e2e.value_models import of_random_taste
from tools.check_logits import transformers_model
from tools.make_tiny_model import build

SERVE = """
name: job
model: {{path: {model}, dtype: float32, max_pixels: 1024}}
cluster: {{gpus: false, start_timeout_s: 600, phase_timeout_s: 600}}
layout: {{ranks: 2, tp: 2, ep: 2}}
serve: {{port: 0, max_tokens: 200, micro_batch_tokens: 400}}
"""
BOUND = 1e-5


@pytest.mark.long
def test_a_served_reward_model_sees_what_the_policy_saw(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    build(policy, layers=2, hidden=128, experts=4, expert_hidden=32, seed=1, family="qwen3_vl_moe")
    reward_model = of_random_taste(policy, tmp_path / "rm", seed=1)
    conversations(tmp_path, "asked", 8, seed=1)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": row[:1], "answer": "r"}) for row in rows))
    settings, tokenizer = ModelSettings(path=policy, max_pixels=1024), load_tokenizer(policy)
    source = FileSource(type="file", path=tmp_path / "rows.jsonl", answer_key="answer")
    prompts = load_prompts(source, tokenizer, SourceFormat(), 160, "data.train", reader=reader_of(settings, 160, "limit"))
    texts = [(index, text) for index in range(len(prompts)) for text in ("rgb", "b")]
    job = Job(tmp_path / "serve", reward_model, verb="serve", template=SERVE).start()
    try:
        job.wait_for("service", lambda: " at http://" in job.text())
        url = job.text().partition(" at ")[2].split()[0]
        asked = requests(prompts, [Response(index, text, 0, 1, 1, True, None, 0) for index, text in texts])
        scores, blind = (
            np.array([one.value for one in HttpScorer(HttpReward(url=url, images=images, timeout_s=300), 2, False).score(asked)], float)
            for images in (True, False)
        )
    finally:
        os.killpg(job.process.pid, signal.SIGINT)
        job.finish()
    model, processor = transformers_model(policy).eval(), ImageProcessor(policy, most=1024)
    head, expected = load_file(reward_model / "model.safetensors")["score.weight"][0], list[float]()
    for index, text in texts:
        answer = encode(tokenizer, [text], special=False)[0]
        tokens_T = torch.tensor([*prompts[index].tokens, *answer, tokenizer.eos_token_id])
        with torch.no_grad():
            hidden_TD = model.model(tokens_T[None], **seen(processor, tokens_T, prompts[index].images)).last_hidden_state[0]
        expected.append(float(hidden_TD[-1] @ head))
    assert scores == pytest.approx(expected, abs=BOUND)
    assert np.std(expected) > 100 * BOUND
    sees = [bool(prompts[index].images) for index, _ in texts]
    assert sum(sees) == 12 and (abs(scores - blind) > 10 * BOUND).tolist() == sees
