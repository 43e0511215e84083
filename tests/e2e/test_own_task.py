"""A stranger's hour in short: a model, a tokenizer, data and a reward of one's own, from `megarl init` to `megarl compare`.

examples/own_task/hour.sh is the whole of it, with an engine for `megarl generate` and `megarl eval`, and the steps that it takes to learn:
`--long` runs that, in processes of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.own_task import make
from megarl.config import ConversationSource, EnvironmentSettings, SftConfig, TrainConfig, load
from megarl.data.supervised import load_conversations
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.checks import tool_schemas
from megarl.loops import generate
from megarl.observe.writers import read_json_lines
from tests.e2e.lab import Lab, called

EXAMPLE = Path(make.__file__).parent


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that is the stranger's, which is where the stranger works."""
    make.make_model(tmp_path / "tiny")
    make.make_data(tmp_path)
    for path in EXAMPLE.glob("my_*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def call_of(word: str) -> str:
    """The call for a word, as the tokenizer's chat template writes it."""
    return f'<tool_call>{{"name": "upper", "arguments": {{"word": "{word}"}}}}</tool_call>'


def test_every_verb_works_on_a_newcomers_data(own: Path, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert len((own / "prompts.jsonl").read_text().splitlines()) == 200

    assert called("init", "tiny", "talks.jsonl", "--cpu", "--out", "sft.yaml") == 0
    with lab.stage():
        assert called("sft", "sft.yaml", "name=sft", "optimizer.lr=3e-3", "sft.steps=30", "save.every=30") == 0
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == f'sft: next: megarl generate {own}/runs/sft/model "a prompt"'
    assert any(line.startswith("sft: model ranks: ready after ") for line in told)
    losses = [row["sft/loss"] for row in read_json_lines(own / "runs/sft/metrics.jsonl") if "sft/loss" in row]
    assert len(losses) == 30 and losses[-1] < 0.8 * losses[0]

    assert called("init", "tiny", "calls.jsonl", "--cpu", "--out", "calls.yaml") == 0
    with lab.stage():
        few = ["name=calls", "model.path=runs/sft/model", "optimizer.lr=3e-3", "sft.steps=10", "save.every=10"]
        assert called("sft", "calls.yaml", *few) == 0
    losses = [row["sft/loss"] for row in read_json_lines(own / "runs/calls/metrics.jsonl") if "sft/loss" in row]
    assert len(losses) == 10 and losses[-1] < 0.8 * losses[0]

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


def test_a_conversation_with_reasoning_and_a_call_is_read_and_learned_as_the_template_writes_it(own: Path) -> None:
    assert called("init", "tiny", "calls.jsonl", "--cpu", "--out", "calls.yaml") == 0
    assert "data:  # the chat template gets the schemas in the column tools\n" in (own / "calls.yaml").read_text()
    config, tokenizer = load(own / "calls.yaml", [], SftConfig), load_tokenizer(own / "tiny")
    assert isinstance(config.data.train, ConversationSource)
    learned = load_conversations(config.data.train, tokenizer, config.data, config.sft.max_tokens, "data.train")
    rows = lines(own / "calls.jsonl")
    assert len(learned) == len(rows) == make.CALLS
    for one, row in zip(learned, rows, strict=True):
        assert tokenizer.decode(one.tokens) == tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        word, tokens, mask = row["messages"][-1]["content"].lower(), one.tokens[one.prompt_length :], one.loss_mask
        assert mask is not None
        assert tokenizer.decode(tokens[mask]) == f"<think>{make.THOUGHT}</think>{call_of(word)}<end>{word.upper()}<end>"
        assert tokenizer.decode(tokens[~mask]) == f"<tool>{word.upper()}<assistant>"
        pieces = tokenizer.convert_ids_to_tokens(one.tokens)
        assert "".join(piece for piece in pieces if len(piece) == 1 and piece.islower()) == 2 * word, "others distract so small a model"


def test_an_episodes_tool_schema_is_that_of_the_training_rows() -> None:
    """The schema in the column `tools` is that of the function, so that an episode begins as a row does."""
    environment = {"source": {"type": "tools", "tools": ["examples.own_task.my_tools:upper"]}}
    assert tool_schemas(EnvironmentSettings.model_validate(environment)) == [{"type": "function", "function": make.TOOL}]


def test_the_script_of_the_own_task_refuses_an_existing_folder(tmp_path: Path) -> None:
    done = subprocess.run(["bash", EXAMPLE / "hour.sh", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == f"hour: error: {tmp_path} is there already: name another directory\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_hour_of_the_own_task_runs_and_learns(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, command in (("python", ""), ("megarl", "-m megarl.cli")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    search = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(EXAMPLE.parents[1])}
    subprocess.run(["bash", EXAMPLE / "hour.sh", tmp_path / "own"], env={**os.environ, **search}, check=True, timeout=3600)
    calls = lines(tmp_path / "own/runs/eval-calls/samples/eval_words_step_0.jsonl")
    right = sum(call_of(row["answer"].lower()) in row["response"] for row in calls)
    assert len(calls) == 100 and right > 80
    ends = json.loads((tmp_path / "own/runs/rl/summary.json").read_text())
    assert ends["score_end"]["sampled"] > ends["score_start"]["sampled"]
