"""Conversion's memory, and plans of models of real size."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.convert import plan
from megarl.models.families import family_of
from tests.published_models import MODELS, config_of
from tests.rows import rows
from tests.unit.convert.converting import WEIGHTS, convert

ROOT = Path(__file__).resolve().parents[3]

# Converts there and back, and prints how much memory each took at most.
MEASURE = """
import json, sys
import megarl.convert.to_hf, megarl.convert.to_megatron
from megarl.cli import main
from tools.peak_memory import PeakMemory

peaks = []
for direction, source, out in (("hf-to-megatron", "source", "steps"), ("megatron-to-hf", "steps", "back")):
    peak = PeakMemory()
    assert main(["convert", direction, f"{sys.argv[1]}/{source}", f"{sys.argv[1]}/{out}", "--workers", "4"]) == 0
    peaks.append(peak.extra())
print(json.dumps(peaks))
"""


def test_memory_is_twice_the_largest_layer_whatever_the_model(tmp_path: Path) -> None:
    hf = {**config_of(MODELS["Qwen3-30B-A3B"]), "hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 4096, "num_experts": 8}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(hf))
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in family_of(hf).expected(hf).items()}
    save_file(tensors, source / WEIGHTS)
    items, _ = plan.planned(source, None, None, 1, 1)
    size, layer = sum(item.size for item in items), plan.largest_layer(items).size
    assert size > 7 * layer > 140 << 20
    del tensors
    # Nothing that is freed is kept: arenas of idle threads come and go with the machine's load, and the way back would use what is left.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    peaks = json.loads(ran.stdout.splitlines()[-1])
    for peak in peaks:
        assert layer // 4 < peak < 2 * layer + (32 << 20), (peaks, layer)  # and what Python and torch take on first use


@pytest.mark.parametrize("name", rows(("Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3"), ("Qwen3-30B-A3B", "DeepSeek-V3")))
def test_a_real_model_is_planned_from_its_configuration_in_seconds(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    begun = time.monotonic()
    convert("hf-to-megatron", "--plan", tmp_path, "--tp", model.layout.tp, "--etp", 2)
    assert time.monotonic() - begun < 120
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["parameters"].startswith(f"{model.parameters:,} ")
