"""What the plan says of an engine, compared with vLLM's source and with what a weight update really sends."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RolloutSettings
from megarl.models.families import FAMILIES, family_of
from megarl.models.weight_map import FP8
from megarl.plan.engines import splits_tokens
from megarl.plan.facts import facts
from megarl.plan.sync import sent_bytes
from tests.published_models import MODELS, config_of


def test_the_models_that_split_tokens_are_those_of_vllm() -> None:
    """In whose source the experts are told of `use_sequence_parallel_moe`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    models = Path(spec.origin).parent / "model_executor" / "models"
    registry, found = (models / "registry.py").read_text(), {}
    for architecture in sorted(family.heads["lm"].architecture for family in FAMILIES.values()):
        [module] = set(re.findall(rf'"{architecture}": \(\s*"(\w+)"', registry))
        source = (models / f"{module}.py").read_text()
        if re.search(r"FusedMoE\w*\(", source):
            found[architecture] = "parallel_config.use_sequence_parallel_moe" in source and "is_sequence_parallel=" in source
    ours = {name: splits_tokens({"architectures": [name]}, 2, 2, expert_parallel=True) for name in found}
    assert found == ours and set(found.values()) == {True, False}
    assert not any(
        splits_tokens({"architectures": ["Qwen3MoeForCausalLM"]}, *sizes, expert_parallel=apart)
        for *sizes, apart in ((1, 2, True), (2, 1, True), (2, 2, False))
    )


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_what_is_sent_is_what_an_update_is_made_of(quantization: Any) -> None:
    """DeepSeek-V3's engines hold the up-projection of the latents twice, but receive it once."""
    hf = {**config_of(MODELS["DeepSeek-V3"]), "n_routed_experts": 16, "n_group": 4}
    item = {FP8: 1, "bfloat16": 2, "float32": 4}
    exactly = 0
    for shape, dtype in family_of(hf).update(hf, "bfloat16", quantization).values():
        size = item[dtype]
        for length in shape:
            size *= length
        exactly += size
    rollout = RolloutSettings(quantization=quantization)
    assert sent_bytes(hf, rollout, "bfloat16") == pytest.approx(exactly, rel=1e-6)
    assert facts(hf).latents is not None
