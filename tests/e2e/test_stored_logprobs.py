"""Supervised distillation on stored log-probs, from the command that writes them to the student that learns them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config import SftConfig, load
from megarl.loops.sft import sft
from tests.e2e.job import ROOT
from tests.e2e.lab import Lab
from tools.make_tiny_model import build

HELD_OUT = "eval/heldout/sft/divergence"
STORED = """\
name: {name}
run_dir: {place}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false}}
optimizer: {{lr: 3.0e-3}}
data: {{train: &rows {{type: taught, path: {place}/rows.jsonl}}, eval: *rows}}
sft: {{steps: 4, batch_size: 8, max_tokens: 64, distillation: {{}}}}
"""


@pytest.mark.long
def test_log_probs_that_generate_writes_are_the_teachers_and_a_student_learns_them(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """They are transformers' at every token of a response; the teacher is at no distance from itself, and a student comes closer."""
    teacher = tmp_path / "teacher"
    build(teacher, layers=2, hidden=128, experts=8, expert_hidden=64, seed=1, family="qwen3")
    prompts = [{"prompt": f"Spell {word}."} for word in ("cat", "horse", "it", "a")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    out = tmp_path / "rows.jsonl"
    given = ("--file", tmp_path / "prompts.jsonl", "--cpu", "--n", "2", "--max-tokens", "12", "--temperature", "0.8")
    run("generate", teacher, *given, "--top-logprobs", "6", "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    assert len(rows) == 8
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            exact_TV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        best_TK = exact_TV.topk(6)
        assert np.array(row["top_logps"]) == pytest.approx(best_TK.values.numpy(), abs=2e-5)
        named_TK = exact_TV.gather(1, torch.tensor(row["top_ids"]))
        torch.testing.assert_close(named_TK, best_TK.values, rtol=0, atol=2e-5)  # of tokens that are as likely, either may be named
    apart = {}
    for name, path in (("itself", teacher), ("student", tiny_model)):
        (tmp_path / f"{name}.yaml").write_text(STORED.format(name=name, place=tmp_path, model=path))
        with lab.stage():
            sft(load(tmp_path / f"{name}.yaml", [], SftConfig))
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        apart[name] = [line[HELD_OUT] for line in lines if HELD_OUT in line]
    assert apart["itself"][0] == pytest.approx(0, abs=1e-5)
    assert apart["student"][0] > 0.1 and apart["student"][-1] < 0.9 * apart["student"][0]


def run(*arguments: object) -> None:
    """Run megarl from the command line."""
    program = [sys.executable, "-c", "from megarl.cli import main; raise SystemExit(main())", *map(str, arguments)]
    subprocess.run(program, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=200)
