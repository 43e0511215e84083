"""Prompts with none to three images, to a served reward model, whose scores are those of transformers, and through `megarl pairs`."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.config import FileSource, HttpReward, ModelSettings, PreferenceData, PreferenceSource, SourceFormat
from megarl.data.images import reader_of
from megarl.data.preferences import load_preferences
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import encode, load_tokenizer
from megarl.models.image_processor import ImageProcessor
from megarl.response import Response
from megarl.rewards.http import HttpScorer
from megarl.step.reward import requests
from tests.e2e.job import Job
from tests.e2e.test_images import called, conversations, seen
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


PAIRS = """
name: pairs
run_dir: {place}
model: {{path: {place}/model, dtype: float32, max_pixels: 1024}}
cluster: {{gpus: false}}
data:
  train: {{type: file, path: {place}/data/rows.jsonl, answer_key: answer}}
  eval: {{type: file, path: {place}/data/rows.jsonl, answer_key: answer}}
reward: {{source: {{type: function, path: "tests.e2e.reward_by_letter:starts"}}}}
rollout: {{samples_per_prompt: 8, temperature: 2.0, max_prompt_tokens: 160, max_response_tokens: 24, max_num_seqs: 16, kv_cache_mb: 32}}
pairs: {{answers: true}}
"""


@pytest.mark.long
def test_pairs_of_answers_to_images_are_read_from_their_own_folder(tmp_path: Path) -> None:
    build(tmp_path / "model", layers=2, hidden=128, experts=4, expert_hidden=32, seed=1, family="qwen3_vl_moe")
    (data := tmp_path / "data").mkdir()
    conversations(data, "asked", 8, seed=1)
    rows = [json.loads(line)["messages"] for line in (data / "asked.jsonl").read_text().splitlines()]
    (data / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": row[:1], "answer": row[1]["content"]}) for row in rows))
    (tmp_path / "pairs.yaml").write_text(PAIRS.format(place=tmp_path))
    called("pairs", "pairs.yaml", place=tmp_path)
    tokenizer, reader = load_tokenizer(tmp_path / "model"), reader_of(ModelSettings(path=tmp_path / "model", max_pixels=1024), 200, "limit")
    source = FileSource(type="file", path=data / "rows.jsonl", answer_key="answer")
    asked = {(tuple(one.ids), *one.images) for one in load_prompts(source, tokenizer, SourceFormat(), 160, "data.train", reader=reader)}
    shutil.rmtree(data)
    pairs = PreferenceSource(path=tmp_path / "pairs" / "train.jsonl")
    read = load_preferences(pairs, tokenizer, PreferenceData(train=pairs, eval=pairs), 200, "data.train", "limit", reader=reader)
    assert any(pair.chosen.images for pair in read)
    for pair in read:
        for side in (pair.chosen, pair.rejected):
            assert (tuple(side.tokens[: side.prompt_length].tolist()), *side.images) in asked
            assert all(placed.image.read() for placed in side.images)
