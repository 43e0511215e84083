"""PPO from a reward model: on the policy's ranks, on ranks of its own, and in another process over HTTP."""

import json
import os
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checks.without_ranks import check_pairs
from megarl.config import ConfigError, PairsConfig, PreferenceData, PreferenceSource, load
from megarl.data.preferences import load_preferences
from megarl.data.template import render_chats
from megarl.data.tokenizer import encode, load_tokenizer
from megarl.errors import Alarmed
from megarl.loops.pairs import write_pairs
from megarl.observe.metrics import scalars
from megarl.observe.run import Run
from megarl.rewards.scale import ScoreRange, write_range
from megarl.step.reward import open_scorers
from tests.e2e.job import Job, read
from tests.e2e.lab import Lab
from tests.e2e.rewards import share_of_letters
from tests.e2e.value_models import of_random_taste
from tests.rows import rows

SERVE = """
name: job
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false, start_timeout_s: 600, phase_timeout_s: 600}}
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
    """Of the reward model as a service."""
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


ENDS = [
    (signal.SIGSTOP, r"ProcessStalled: serve: rank 0: .*has been stopped by a signal for \d+ s"),
    (signal.SIGKILL, r"WorkerDied: serve: rank 0 died"),
]


@pytest.mark.parametrize(("number", "fault"), rows(ENDS, ENDS[1:]))
def test_an_idle_service_ends_when_its_rank_does(tmp_path: Path, reward_model: Path, number: signal.Signals, fault: str) -> None:
    job = Job(tmp_path, reward_model, ("cluster.stall_timeout_s=3",), verb="serve", template=SERVE).start()
    try:
        job.wait_for("service", lambda: " at http://" in job.text())
        [rank] = [pid for pid in job.pids() if read(f"/proc/{pid}/cmdline").startswith(b"ray::RewardWorker")]
        begun = time.monotonic()
        os.kill(rank, number)
        assert job.finish(60) == 1 and re.search(f"^megarl: failed: {fault}", job.text(), re.MULTILINE), job.text()
        assert time.monotonic() - begun < 30 and job.gone()
    finally:
        job.kill()


@pytest.mark.long
def test_ppo_is_the_same_wherever_its_reward_model_stands(lab: Lab, tmp_path: Path, tiny_model: Path, reward_model: Path, url: str) -> None:
    parts = (
        f"{{name: judge, source: {{type: reward_model, path: {reward_model}}}, weight: 0.25}}",
        f"{{name: far, source: {{type: http, url: '{url}'}}, weight: 0.75}}",
    )
    sources = {
        "shared": (f"reward.source={{type: reward_model, path: {reward_model}}}", "reward.eval={type: reasoning_gym}"),
        "apart": (
            f"reward.source={{type: reward_model, path: {reward_model}}}",
            "placement.reward={ranks: 2, ep: 2}",
            "train.steps=1",
        ),
        "served": (f"reward.source={{type: http, url: '{url}'}}", "train.steps=1"),
        "both": (f"reward.source={{type: sum, parts: [{', '.join(parts)}]}}", "reward.eval={type: reasoning_gym}", "train.steps=1"),
    }
    runs = {name: lab.run(Job(tmp_path / name, tiny_model, (*PPO, *source))).updates() for name, source in sources.items()}
    one = runs["shared"]
    assert (
        len(one) == 2 and one[0]["reward/min"] < one[0]["reward/max"] and one[0]["actor/reference_kl"] == 0 < one[1]["actor/reference_kl"]
    )
    assert one[1]["actor/kl_coef"] != one[0]["actor/kl_coef"], "the KL's weight is steered"
    for name, steps in runs.items():
        for metric in ("reward/mean", "reward/max", "critic/vf_loss", "critic/grad_norm", "actor/grad_norm"):
            assert steps[0][metric] == pytest.approx(one[0][metric], rel=5e-3, abs=1e-5), (name, metric)
    summary = json.loads((tmp_path / "shared" / "job" / "summary.json").read_text())
    assert 0 <= summary["pass_rate_end"]["sampled"] <= 1, "evaluations count what reward.eval counts"


PAIRS = """
name: job
run_dir: {runs}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false}}
data:
  train: {{type: reasoning_gym, dataset: spell_backward, params: {{min_word_len: 3, max_word_len: 5}}, seed: 7, items: 24}}
  eval: {{type: reasoning_gym, dataset: spell_backward, params: {{min_word_len: 3, max_word_len: 5}}, seed: 1000000000, items: 8}}
reward: {{source: {{type: function, path: "tests.e2e.rewards:share_of_letters"}}}}
rollout: {{samples_per_prompt: 4, max_prompt_tokens: 64, max_response_tokens: 64, kv_cache_mb: 32}}
pairs: {{per_prompt: 2, answers: true, prompts_per_call: 10}}
"""


def test_pairs_of_own_responses_are_what_a_reward_model_reads(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    config = load(Job(tmp_path, tiny_model, template=PAIRS).write(), [], PairsConfig)
    prompts, path = check_pairs(config).train, tmp_path / "pairs.jsonl"
    with Run(config) as run, open_scorers(config.reward, run.note) as scorers:
        found = scalars(write_pairs(config, path, prompts, lab.engines, scorers.rewards()[0], run, 0))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert found["pairs"] == len(rows) > 0 and 0 < found["prompts_with_pairs"] <= 1
    for row in rows:
        better, worse = (share_of_letters(prompt="", response=row[side], answer="", meta={}) for side in ("chosen", "rejected"))
        assert row["margin"] == pytest.approx(better - worse) and row["margin"] > 0
    assert {row["prompt"] for row in rows} <= {prompt.text for prompt in prompts}
    source = PreferenceSource(path=path)
    read = load_preferences(
        source, load_tokenizer(tiny_model), PreferenceData(train=source, eval=source), 128, "data.train", "rm.max_tokens"
    )
    assert [pair.margin for pair in read] == [row["margin"] for row in rows]


def test_rewards_are_relative_to_the_first_policy_and_told_where_the_reward_model_has_not_been(
    lab: Lab, tmp_path: Path, tiny_model: Path, reward_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every score is outside a range that was narrow on purpose; the run stops with a checkpoint, and goes on when it is told to."""
    narrow = tmp_path / "narrow"
    shutil.copytree(reward_model, narrow)
    write_range(narrow, ScoreRange(0.0, 1e-9))
    source = (
        f"reward={{source: {{type: reward_model, path: {narrow}}}, normalise: {{prompts: 16, clip: 2.0}}, eval: {{type: reasoning_gym}}}}"
    )
    job = Job(tmp_path, tiny_model, (*PPO, "train.steps=4", source, "train.on_alarm=stop"))
    with pytest.raises(Alarmed, match=r"step 3: reward outside range: for 3 steps .* now 100%.*train\.on_alarm=continue"):
        lab.run(job)
    assert len(job.updates()) == 3 and "warning: step 3: reward outside range" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^train\.on_alarm=stop: an alarm has ended this run \(step 3: reward outside range"):
        lab.run(job)
    job.overrides = (*job.overrides, "train.on_alarm=continue")
    rows = lab.run(job).updates()
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["reward/outside/mean"] == 1 for row in rows)
    assert all(-2 <= row["reward/min"] < row["reward/max"] <= 2 for row in rows)
    [first] = [row for row in job.rows() if "reward/reference_mean" in row]
    assert abs(rows[0]["reward/unnormalised/mean"] - first["reward/reference_mean"]) < first["reward/reference_std"]
    assert "reward_outside_range" in json.loads((tmp_path / "job" / "summary.json").read_text())["alarms"]
