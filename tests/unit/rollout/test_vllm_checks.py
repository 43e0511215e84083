"""What is known of vLLM before it starts still is what its source says."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import ConfigError, RolloutSettings
from megarl.models.families import FAMILIES
from megarl.rollout.vllm.checks import HEAD_SIZES, check, native_architectures


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


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("architecture", ["SmolLM3ForCausalLM", "Olmo2ForCausalLM", "NobodysForCausalLM"])
def test_an_architecture_that_vllm_has_no_code_of_its_own_for_is_refused(tiny_model: Path, architecture: str, gpu: bool) -> None:
    """The first two it would run through its transformers backend."""
    hf = {**json.loads((tiny_model / "config.json").read_text()), "architectures": [architecture]}
    with pytest.raises(
        ConfigError, match=rf"^model\.path: vLLM 0\.30\.0 has no native implementation of {architecture}, and [^\n]*backend$"
    ):
        check(hf, "float32", RolloutSettings(kv_cache_mb=64), gpu=gpu)


def test_vllm_has_code_of_its_own_for_every_family() -> None:
    policies = {family.heads["lm"].architecture for family in FAMILIES.values()}
    assert policies <= native_architectures()


def test_the_architectures_are_read_without_importing_vllm() -> None:
    code = "import sys; from megarl.rollout.vllm.checks import native_architectures as known; assert known() and 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
