"""The stages that learn from pairs: accuracy and margin rise on held-out pairs, and stay what they were."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.checks.without_engines import check_dpo, check_rm
from megarl.config import DpoConfig, RmConfig, load
from megarl.data.conversations import Conversation
from megarl.data.preferences import Preference
from tests.e2e.job import HEAD, Job
from tests.e2e.lab import Lab
from tests.unit.data.written import written

STAGE = (
    HEAD
    + """data:
  train: {{type: file, path: {runs}/train.jsonl}}
  eval: {{type: file, path: {runs}/eval.jsonl}}
"""
)
STEPS = "{{steps: 12, batch_size: 16, micro_batch_tokens: 256, max_tokens: 48, eval_every: 6}}\n"


def write_pairs(path: Path, seed: int, count: int) -> None:
    """A liking for vowels: words of them are chosen, words of consonants rejected."""
    rng = np.random.default_rng(seed)

    def word(letters: str, fewest: int) -> str:
        return "".join(rng.choice(list(letters), int(rng.integers(fewest, 9))))

    rows = [{"prompt": word("abcdefgh", 3), "chosen": word("aeiou", 2), "rejected": word("bcdfgh", 2)} for _ in range(count)]
    written(path, *rows)


def run(lab: Lab, runs: Path, model: Path, verb: str, *overrides: str) -> Job:
    runs.mkdir(parents=True, exist_ok=True)
    write_pairs(runs / "train.jsonl", 1, 192)
    write_pairs(runs / "eval.jsonl", 2, 33)
    return lab.learn(Job(runs, model, overrides, verb=verb, template=f"{STAGE}{verb}: {STEPS}"), picture=True)


def summary(job: Job) -> dict[str, Any]:
    return json.loads((job.runs / "job" / "summary.json").read_text())["results"]


@pytest.fixture(scope="module")
def reward_model(lab: Lab, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    return run(lab, tmp_path_factory.mktemp("rm"), tiny_model, "rm", "layout.ranks=2", "layout.tp=2", "layout.ep=2", "rm.patience=2")


def test_a_reward_model_learns_to_rank_held_out_pairs(reward_model: Job) -> None:
    result = summary(reward_model)
    before, after = result["held-out before"], result["held-out after"]
    assert after["rm/accuracy"] > 0.95 and after["rm/accuracy"] > before["rm/accuracy"]
    assert after["rm/gap"] > before["rm/gap"] + 1 and after["rm/loss"] < before["rm/loss"]
    measured = [row["step"] for row in reward_model.rows() if "eval/heldout/rm/accuracy" in row]
    assert measured == [0, 6, 12]
    assert all(row["rm/grad_norm"] > 0 and row["perf/tokens"] > 0 for row in reward_model.rows() if "rm/loss" in row)
    assert (reward_model.runs / "job" / "report.png").is_file()
    best = max((row for row in reward_model.rows() if row["step"] and "eval/heldout/rm/accuracy" in row), key=how_good)
    assert after["rm/loss"] == best["eval/heldout/rm/loss"]


def how_good(row: dict[str, float]) -> tuple[float, float]:
    return row["eval/heldout/rm/accuracy"], -row["eval/heldout/rm/loss"]


def test_a_saved_reward_model_is_measured_without_a_step_and_by_transformers(lab: Lab, reward_model: Job, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    saved, after = reward_model.runs / "job" / "model", summary(reward_model)["held-out after"]
    again = run(lab, tmp_path, saved, "rm", "rm.steps=0")
    assert summary(again) == {"held-out": pytest.approx(after, rel=1e-4, abs=1e-6)}
    assert not (tmp_path / "job" / "model").exists()
    pairs = check_rm(load(tmp_path / "job.yaml", [], RmConfig)).held_out
    classifier = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32)

    def score(tokens: np.ndarray) -> float:
        with torch.no_grad():
            return float(classifier(torch.from_numpy(tokens[None].astype(np.int64))).logits)

    gaps = [score(pair.chosen.tokens) - score(pair.rejected.tokens) for pair in pairs]
    assert np.mean(gaps) == pytest.approx(after["rm/gap"], rel=1e-3) and np.mean(np.array(gaps) > 0) == pytest.approx(after["rm/accuracy"])
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == AutoTokenizer.from_pretrained(reward_model.model).get_vocab()


@pytest.mark.long  # as examples/test_in_short.py has it
def test_dpo_raises_the_margin_of_held_out_pairs(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    job = run(lab, tmp_path, tiny_model, "dpo", "layout.ranks=2", "layout.cp=2", "algorithm.label_smoothing=0.1")
    before, after = summary(job)["held-out before"], summary(job)["held-out after"]
    assert abs(before["dpo/margin"]) < 1e-5 and before["dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert after["dpo/accuracy"] > 0.9 and after["dpo/margin"] > 0.5 and after["dpo/loss"] < before["dpo/loss"]
    assert after["dpo/chosen_shift"] - after["dpo/rejected_shift"] == pytest.approx(after["dpo/margin"] / 0.1, rel=1e-4)
    pairs = check_dpo(load(tmp_path / "job.yaml", [], DpoConfig)).held_out
    gain = log_probs(tmp_path / "job" / "model", pairs) - log_probs(tiny_model, pairs)
    margins = 0.1 * (gain[:, 0] - gain[:, 1])
    assert margins.mean() == pytest.approx(after["dpo/margin"], rel=1e-4), "transformers' log-probs of both models give the same margin"
    assert (margins > 0).mean() == pytest.approx(after["dpo/accuracy"])


def log_probs(model: Path, pairs: Sequence[Preference]) -> np.ndarray:
    """The log-prob of both responses of each pair by transformers, one sequence at a time: [pairs, 2]."""
    from transformers import AutoModelForCausalLM

    language = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def log_prob(side: Conversation) -> float:
        tokens = torch.from_numpy(side.tokens.astype(np.int64))
        with torch.no_grad():
            logp = language(tokens[None]).logits[0, :-1].log_softmax(-1)
        return float(logp.gather(1, tokens[1:, None])[side.prompt_length - 1 :].sum())

    return np.array([[log_prob(pair.chosen), log_prob(pair.rejected)] for pair in pairs])
