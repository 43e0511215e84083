"""RL on episodes of an environment that shows pictures, with engines ahead of the ranks.

What is trained is what was sampled. A checkpoint has references to pictures alone, and a run goes on from it as if nothing had been.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.resume import shown_images
from tests.e2e.comparing import assert_same, cut_after
from tests.e2e.job import Job
from tests.e2e.lab import Lab
from tools.make_tiny_model import build

SHOWN = (
    "environment={source: {type: function, path: 'tests.e2e.games:Pictures'}, max_turns: 2, max_turn_tokens: 5, step_s: 60, workers: 2}",
    "data.train={type: episodes, seed: 7, items: 64}",
    "data.eval={type: episodes, seed: 1000, items: 8}",
    "reward={source: {type: environment}}",
    "model.max_pixels=1024",
    "rollout={mode: ahead, samples_per_prompt: 4, max_prompt_tokens: 48, max_response_tokens: 80, max_num_seqs: 64, kv_cache_mb: 16}",
    "rollout.timeout_s=600",
    *("routing.replay=r3", "algorithm.correction={type: tis}"),
    *("train.steps=3", "train.eval_every=3", "save.every=1", "save.keep_last=3"),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_vl_moe", "{ranks: 2, ep: 2, tp: 2}"), ("qwen3_5_moe_vl", "{ranks: 2, pp: 2}")],
)
def test_a_run_that_sees_pictures_goes_on_as_if_nothing_had_been(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layout: str
) -> None:
    overrides = (*SHOWN, f"layout={layout}")
    monkeypatch.setattr(shown_images, "SHOWN_STEPS", 1)
    build(tmp_path / "model", layers=2, hidden=128, experts=4, expert_hidden=32, seed=1, family=family)
    straight = lab.run(Job(tmp_path / "straight", tmp_path / "model", overrides), own_engine=True)
    rows = straight.steps()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["training/logprob_gap_mean"] <= 1e-5 < rows[1]["training/logprob_gap_mean"], "old weights have sampled the second"
    assert all(row["routing/replay_hit_rate"] == 1.0 and 0 < row["actor/grad_norm"] < 100 for row in rows)
    assert all(row["environment/failed"] == 0 and row["environment/turns/mean"] == 2 for row in rows)
    run = straight.runs / "job"
    page = (run / "report.html").read_text()
    assert page.count('src="data:image/jpeg;base64,') > 8
    record = json.loads((run / "samples" / "step_1.jsonl").read_text().splitlines()[0])
    assert len(record["images"]) == 2 and "<|image_pad|>" not in record["prompt"] + record["response"]

    cut = cut_after(1, straight, tmp_path / "cut")
    with np.load(cut / "job" / "checkpoints" / "step_000001" / "ahead.npz") as saved:
        meta = json.loads(saved["meta"].tobytes())
    image = meta["groups"][0]["responses"][0]["response"]["images"][0]["image"]
    assert image["source"]["path"].endswith(f"/images/2/{image['digest']}") and Path(image["source"]["path"]).is_file()
    assert sorted(path.name for path in (run / "images").iterdir()) == ["2", "3"], "of the first step, nothing refers to them any more"
    again = lab.run(Job(cut, tmp_path / "model", overrides), own_engine=True)
    assert_same(again, straight, "model")


@pytest.mark.long
def test_images_that_an_agent_sends_are_learned_as_the_engine_read_them(lab: Lab, tmp_path: Path) -> None:
    """Over OpenAI's client, two in one conversation: one context, whose log-probs and experts are the engine's."""
    build(tmp_path / "model", layers=2, hidden=128, experts=4, expert_hidden=32, seed=1, family="qwen3_vl_moe")
    agent = (
        "environment={source: {type: agent, function: 'tests.e2e.agents:look'}, max_turns: 2, max_turn_tokens: 5, sandbox: {network: true}}"
    )
    overrides = (*SHOWN, agent, "rollout.mode=sync", "algorithm.correction=null", "layout={ranks: 2, ep: 2, tp: 2}")
    job = lab.run(Job(tmp_path / "job", tmp_path / "model", overrides), own_engine=True)
    rows = job.steps()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["training/logprob_gap_mean"] <= 1e-5 and row["routing/replay_hit_rate"] == 1.0 and row["actor/grad_norm"] > 0
        assert row["environment/failed"] == 0 and row["environment/turns/mean"] == 2
    record = json.loads((job.runs / "job" / "samples" / "step_1.jsonl").read_text().splitlines()[0])
    assert len(record["images"]) == 2 and "<|image_pad|>" not in record["prompt"] + record["response"]
