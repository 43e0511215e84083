"""RL from images with engines that are ahead of the ranks or share their devices: what is trained on is what was sampled."""

import json
from pathlib import Path

import pytest

from tests.e2e.comparing import assert_same, cut_after
from tests.e2e.job import HEAD, Job
from tests.e2e.lab import Lab
from tests.e2e.test_images import conversations
from tools.make_tiny_model import build

RL = (
    HEAD
    + """algorithm: {{type: grpo}}
reward: {{source: {{type: function, path: "tests.e2e.reward_by_letter:starts"}}, require_finished: false}}
routing: {{replay: r3}}
rollout: {{samples_per_prompt: 4, max_prompt_tokens: 160, max_response_tokens: 8, max_num_seqs: 16, kv_cache_mb: 32, timeout_s: 600}}
sync: {{transport: shm}}
log: {{tensorboard: false}}
train: {{steps: 4, prompts_per_step: 4, micro_batch_tokens: 1024, eval_at_start: false}}
save: {{every: 1, keep_last: 4}}
"""
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees, and questions about none to three pictures."""
    place = tmp_path_factory.mktemp("seeing")
    build(place / "model", layers=2, hidden=128, experts=4, expert_hidden=32, seed=1, family="qwen3_vl_moe")
    conversations(place, "asked", 24, seed=1)
    asked = [json.loads(line)["messages"] for line in (place / "asked.jsonl").read_text().splitlines()]
    (place / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": row[:1], "answer": row[1]["content"]}) for row in asked))
    return place


def job(runs: Path, place: Path, *more: str) -> Job:
    source = f"{{type: file, path: {place / 'rows.jsonl'}, answer_key: answer, rows: 8}}"
    data = (f"data.train={source.replace('rows: 8', 'rows: 24')}", f"data.eval={source}")
    return Job(runs, place / "model", ("model.max_pixels=1024", *data, *more), template=RL)


BUDGET = ("algorithm.correction={type: tis}", "rollout.mode=budget", "rollout.budget_tokens=3")


@pytest.mark.long
def test_responses_to_images_that_go_on_with_new_weights_are_resumed(lab: Lab, tmp_path: Path, place: Path) -> None:
    """Responses to pictures are in the checkpoint half done, and the run that goes on from it ends as the one that was not cut."""
    straight = lab.run(job(tmp_path / "straight", place, *BUDGET))
    rows = straight.steps()
    assert rows[0]["training/logprob_gap_mean"] <= 1e-5 and max(row["rollout/lag_mixed"] for row in rows) > 0.3
    assert all(row["routing/replay_hit_rate"] == 1.0 and row["actor/grad_norm"] > 0 for row in rows)
    cut = cut_after(2, straight, tmp_path / "cut")
    rest = cut / "job" / "checkpoints" / "step_000002" / "ahead.rest.npz"
    assert rest.is_file() and str(place).encode() in b"".join(file.read_bytes() for file in rest.parent.glob("*") if file.is_file())
    assert_same(lab.run(job(cut, place, *BUDGET)), straight, "model")


@pytest.mark.long
def test_engines_that_share_devices_see_after_every_turn(tmp_path: Path, place: Path) -> None:
    """Ranks and engine put their weights away and take them back, those of the tower among them, which is trained."""
    run = job(tmp_path, place, "placement.engines=shared", "model.vision=train", "optimizer.lr=0.005").start()
    assert run.finish() == 0, run.text()[-2000:]
    rows = run.steps()
    assert len(rows) == 4 and all(row["routing/replay_hit_rate"] == 1.0 for row in rows)
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4
