"""What is known of vLLM before it starts still is what its source says."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from megarl.config import ConfigError, RolloutSettings
from megarl.rollout.vllm.checks import HEAD_SIZES, check


def test_the_head_sizes_are_those_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "v1/attention/backends/cpu_attn.py").read_text())
    [sizes] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"]
    assert isinstance(sizes.body[-1], ast.Return) and sizes.body[-1].value is not None
    assert tuple(ast.literal_eval(sizes.body[-1].value)) == HEAD_SIZES


def test_a_head_that_no_cpu_engine_takes_is_refused(tiny_model: Path) -> None:
    hf, settings = json.loads((tiny_model / "config.json").read_text()), RolloutSettings(kv_cache_mb=64)
    check(hf, "float32", settings, gpu=False)
    narrow = {**hf, "head_dim": 16}
    with pytest.raises(ConfigError, match=r"^model\.path: config\.json's head_dim=16: vLLM's CPU engines take 32, 64, "):
        check(narrow, "float32", settings, gpu=False)
    check(narrow, "float32", settings, gpu=True)
