"""A stranger's hour in short: a model, a tokenizer, data and a reward of one's own, from `megarl init` to `megarl compare`.

examples/own_task/hour.sh is the whole of it, with an engine for `megarl generate` and `megarl eval`, and the steps that it takes to learn:
`--long` runs that, in processes of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.own_task import make
from megarl.config import TrainConfig, load
from megarl.observe.writers import read_json_lines
from megarl.stages import generate
from tests.e2e.lab import Lab, called

EXAMPLE = Path(make.__file__).parent


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that is the stranger's, which is where the stranger works."""
    make.make_model(tmp_path / "tiny")
    make.make_data(tmp_path)
    shutil.copy(EXAMPLE / "my_reward.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_verb_takes_what_a_stranger_brings(own: Path, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert len((own / "prompts.jsonl").read_text().splitlines()) == 200

    assert called("init", "tiny", "talks.jsonl", "--cpu", "--out", "sft.yaml") == 0
    with lab.stage():
        assert called("sft", "sft.yaml", "name=sft", "optimizer.lr=3e-3", "sft.steps=30", "save.every=30") == 0
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == f'sft: next: megarl generate {own}/runs/sft/model "a prompt"'
    assert any(line.startswith("sft: model ranks: ready after ") for line in told)
    losses = [row["sft/loss"] for row in read_json_lines(own / "runs/sft/metrics.jsonl") if "sft/loss" in row]
    assert len(losses) == 30 and losses[-1] < 0.8 * losses[0]

    assert called("init", "runs/sft/model", "prompts.jsonl", "--cpu", "--out", "rl.yaml") == 0
    few = ["name=rl", "train.steps=2", "train.eval_every=0", "rollout.max_response_tokens=8", "save.every=2"]
    lab.train(load(own / "rl.yaml", few, TrainConfig))
    rewards = [row["reward/mean"] for row in read_json_lines(own / "runs/rl/metrics.jsonl") if "reward/mean" in row]
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)

    assert called("init", "runs/sft/model", "pairs.jsonl", "--cpu", "--out", "dpo.yaml") == 0
    with lab.stage():
        pairs = ["data.eval.path=pairs_heldout.jsonl", "dpo.steps=4", "save.every=4"]
        assert called("dpo", "dpo.yaml", "name=dpo", "optimizer.lr=1e-3", *pairs) == 0
    results = json.loads((own / "runs/dpo/summary.json").read_text())["results"]
    assert results["held-out after"]["dpo/margin"] > results["held-out before"]["dpo/margin"]

    capsys.readouterr()
    assert called("samples", "runs/rl", "--worst", "--search", "capitals") == 0
    assert "Capitals: " in capsys.readouterr().out
    assert called("compare", "runs/rl", "runs/dpo") == 0
    shutil.copy(EXAMPLE / "eval.yaml", own)
    assert called("eval", "eval.yaml", "--check") == 0
    job = generate.check(generate.parser().parse_args(["runs/rl/model", "Capitals: cat", "--cpu", "--max-tokens", "8"]))
    assert job.tokenizer.decode(job.prompts[0].tokens) == "<user>Capitals: cat<assistant>"


def test_the_script_leaves_a_folder_alone_that_is_there(tmp_path: Path) -> None:
    done = subprocess.run(["bash", EXAMPLE / "hour.sh", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"hour: error: {tmp_path} is there already: name another directory\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_hour_itself(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, command in (("python", ""), ("megarl", "-m megarl.cli")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    search = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(EXAMPLE.parents[1])}
    subprocess.run(["bash", EXAMPLE / "hour.sh", tmp_path / "own"], env={**os.environ, **search}, check=True, timeout=3600)
    ends = json.loads((tmp_path / "own/runs/rl/summary.json").read_text())
    assert ends["score_end"]["sampled"] > ends["score_start"]["sampled"]
