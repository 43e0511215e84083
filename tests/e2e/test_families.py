"""The RL job on other families than the quickstart's: a dense model, and experts with a bias behind a dense layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.job import Job
from tools.make_tiny_model import build

JOBS = {
    "qwen3": ("layout.ranks=2", "layout.tp=2"),
    "glm4_moe": ("layout.ranks=2", "layout.tp=2", "layout.ep=2", "sync.transport=gloo", "model.drop_mtp=true"),
}
PREDICTOR = "model.layers.2."  # behind the last layer


def add_predictor(model: Path) -> None:
    """Tensors of a layer of multi-token prediction, as published checkpoints have them."""
    tensors = load_file(model / "model.safetensors")
    layer = {name.replace(".layers.1.", ".layers.2."): tensor.clone() for name, tensor in tensors.items() if ".layers.1." in name}
    further = {"eh_proj.weight": torch.zeros(128, 256), "enorm.weight": torch.ones(128), "hnorm.weight": torch.ones(128)}
    save_file({**tensors, **layer, **{PREDICTOR + name: tensor for name, tensor in further.items()}}, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


@pytest.mark.parametrize("family", JOBS)
def test_the_job_runs_on_other_families(tmp_path: Path, family: str) -> None:
    """Every sync is checked by fingerprints (sync.verify), and engine and trainer agree about every token after an update."""
    model = tmp_path / "model"
    build(model, layers=2, hidden=128, experts=8, expert_hidden=64, seed=1, family=family)
    if family == "glm4_moe":
        add_predictor(model)
    job = Job(tmp_path, model, ("train.steps=2", *JOBS[family])).run()
    steps, out = job.steps(), tmp_path / "job" / "model"
    assert len(steps) == 2 and all(row["actor/grad_norm"] > 0 for row in steps)
    assert all(row["training/logprob_gap_mean"] <= 1e-5 and row["training/logprob_gap_max"] <= 1e-4 for row in steps)
    assert [row.get("routing/changed_frac") for row in steps] == ([None, None] if family == "qwen3" else [0, 0])
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert after.keys() == {name for name in before if not name.startswith(PREDICTOR)}
    assert json.loads((out / "config.json").read_text()).get("num_nextn_predict_layers", 0) == 0
    kept = {name for name in after if (before[name] == after[name]).all()}
    biases = {name for name in after if name.endswith("e_score_correction_bias")}
    assert biases <= kept and all(".mlp.experts." in name for name in kept - biases), "an expert that no token chose stays"
