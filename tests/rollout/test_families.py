"""Engines serve the other families too: what is sent is what they hold, and what they say afterwards is transformers' answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.config import ConfigError
from megarl.models.hf import read_config
from megarl.rollout.generate import Sampling
from megarl.rollout.registry import check_engine
from megarl.sync.fingerprint import compare
from tests.rollout.engine_host import Host
from tests.rollout.test_updates import SETTINGS, _check_update, _start, check_plan
from tests.rollout.transformers_reference import PROMPTS, TIMEOUT_S, Trainer, generate
from tools.make_tiny_model import build

SIZES = {"layers": 2, "hidden": 128, "experts": 8, "expert_hidden": 64}
SAMPLING = Sampling(n=1, temperature=0.0, max_tokens=4, seed=0)
FUSED = "model.layers.1.self_attn.qkv_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def other(path: Path, family: str) -> Any:
    """transformers' model of another seed, sharper than the one that the engine starts with."""
    from transformers import AutoModelForCausalLM

    build(path, **SIZES, seed=2, family=family, initializer_range=0.12)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def stored(path: Path, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """As a trainer of that dtype exports it."""
    tensors = load_file(path / "model.safetensors").items()
    return [(name, tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)) for name, tensor in tensors]


async def _follows(tmp_path: Path, family: str) -> None:
    build(tmp_path / "model", **SIZES, seed=1, family=family)
    engine = await _start(tmp_path / "model")
    try:
        model = other(tmp_path / "other", family)
        await _check_update(engine, Trainer(engine, "shm"), model, stored(tmp_path / "other"))
        routed = (await generate(engine, PROMPTS, SAMPLING))[0].samples[0].routed_experts
        assert (routed is not None) == (family in ("mixtral", "glm4_moe"))
    finally:
        await engine.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen2_tied", "llama", "mixtral", "glm4_moe"])
def test_an_engine_of_another_family_follows_an_update(host: Host, tmp_path: Path, family: str) -> None:
    host.run(_follows, tmp_path, family)


async def _fused(tmp_path: Path, tp: int) -> None:
    build(tmp_path / "model", **SIZES, seed=1, family="phi3")
    engine = await _start(tmp_path / "model", tp=tp)
    trainer = Trainer(engine, "gloo", tp)
    try:
        tensors = stored(tmp_path / "model")
        digest = await trainer.update(tensors)
        held = await engine.fingerprints(TIMEOUT_S)
        assert compare(digest, held) == [] and all(len(places) == 1 for places in held.values())
        if tp == 1:
            weight = dict(tensors)[FUSED].clone()
            weight[130, 5] *= 1.01  # a key's
            await engine._call("megarl_corrupt_linear", "self_attn.qkv_proj", weight.tolist(), timeout_s=TIMEOUT_S)
            assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == [FUSED]
        await _check_update(engine, trainer, other(tmp_path / "other", "phi3"), stored(tmp_path / "other"))
        await check_plan(engine, tmp_path / "model", tp)
    finally:
        trainer.close()
        await engine.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tensor_of_several_projections_follows_updates_on_any_rank(host: Host, tmp_path: Path, tp: int) -> None:
    host.run(_fused, tmp_path, tp)


async def _bias(tmp_path: Path, dtype: str) -> None:
    build(tmp_path / "model", **SIZES, seed=1, family="glm4_moe")
    engine = await _start(tmp_path / "model", dtype)
    try:
        digest = await Trainer(engine, "shm").update(stored(tmp_path / "model", getattr(torch, dtype)))
        held = await engine.fingerprints(TIMEOUT_S)
        assert compare(digest, held) == [] and len(held[BIAS]) == 2, "the router's, and where the experts' kernel reads it"
        await engine._call("megarl_corrupt", "expert_bias", timeout_s=TIMEOUT_S)
        assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == [BIAS]
    finally:
        await engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_expert_bias_is_float32_in_every_engine_and_checked(host: Host, tmp_path: Path, dtype: str) -> None:
    host.run(_bias, tmp_path, dtype)


def test_multi_latent_attention_on_a_cpu_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    build(tmp_path / "model", **SIZES, seed=1, family="deepseek_v3")
    hf = read_config(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^model\.path: config\.json's kv_lora_rank=32: .* needs GPU engines \(cluster\.gpus=true\)$"):
        check_engine(hf, "float32", SETTINGS, gpu=False)
    check_engine(hf, "float32", SETTINGS, gpu=True)
