"""Engines with an adapter beside the base model: what they say is transformers' answer with merged weights, and what they hold was sent."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from megarl.checks.train import check_adapters
from megarl.config import ConfigError, LoraSettings, RolloutSettings, TrainConfig
from megarl.config.loading import load
from megarl.engines.engine import RolloutError, Setup
from megarl.engines.generate import Sampling
from megarl.models.adapters import PEFT, adapted, peft_config, target_of
from megarl.models.description import ModelDescription
from megarl.sync.fingerprint import Fingerprinter, compare
from tests.engines.engine_host import Host
from tests.engines.test_families import SIZES, stored
from tests.engines.test_updates import Corruptible, assert_all_greedy
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S, generate, logp
from tools.check_logits import transformers_model
from tools.make_tiny_model import build

SETTINGS = RolloutSettings(max_prompt_tokens=32, max_response_tokens=24, timeout_s=TIMEOUT_S, kv_cache_mb=64)
EXACT = 3e-5
ROOT = Path(__file__).parents[2]


def factors(model: ModelDescription, lora: LoraSettings, seed: int) -> dict[str, Tensor]:
    """Random factors of all adapted matrices, with the scale in B."""
    generator, made = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for weight, each in adapted(model, lora).values():
        for one in each:
            for factor in (one.a, one.b):
                made[factor.hf[0]] = 0.1 * torch.randn(factor.op.shapes[0], generator=generator)
            assert weight.hf[one.index] == one.b.hf[0].removeprefix(PEFT).replace(".lora_B", "")
    return made


def merged(base: Any, made: dict[str, Tensor]) -> Any:
    """transformers' model with the adapter in its weights."""
    model = copy.deepcopy(base)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, b in made.items():
            if ".lora_B." in name:
                weights[name.removeprefix(PEFT).replace(".lora_B", "")].add_(b @ made[name.replace(".lora_B", ".lora_A")])
    return model.eval()


async def _adapters(path: Path) -> None:
    lora, model = LoraSettings(rank=6, alpha=6), ModelDescription.read(path)
    parts = adapted(model, lora).values()
    config = peft_config(lora, str(path), (target_of(weight, one) for weight, each in parts for one in each))
    base, engine = transformers_model(path).eval(), Corruptible("engine 0")
    await engine.start(Setup(path, "float32", SETTINGS, 1, gpu=False, report_experts=True, lora=lora))
    try:
        with pytest.raises(RolloutError, match="0 adapters are in use"):
            await engine.adapter_fingerprints(TIMEOUT_S)
        weights = Fingerprinter()
        for name, tensor in stored(path):
            weights.add(name, tensor)
        assert compare(weights.digest(), await engine.fingerprints(TIMEOUT_S)) == []
        for version, seed in enumerate((1, 2, 1), 1):
            made, prints = factors(model, lora, seed), Fingerprinter()
            for name, factor in made.items():
                prints.add(name, factor)
            await engine.load_adapter(save(made), config, version, TIMEOUT_S)
            assert compare(prints.digest(), await engine.adapter_fingerprints(TIMEOUT_S)) == []
            ours = merged(base, made)
            greedy = await generate(engine, PROMPTS, Sampling(n=1, temperature=0.0, max_tokens=24, seed=0))
            assert_all_greedy(ours, greedy)
            assert {span.version for answer in greedy for span in answer.samples[0].weight_versions} == {version}
            for answer in await generate(engine, PROMPTS, Sampling(n=4, temperature=0.7, max_tokens=24, seed=1)):
                for one in answer.samples:
                    theirs = logp(ours, one.tokens.tolist(), one.prompt_length, 0.7)
                    assert float((torch.from_numpy(one.rollout_logp) - theirs).abs().max()) <= EXACT
                    far = logp(base, one.tokens.tolist(), one.prompt_length, 0.7)
                    assert float((torch.from_numpy(one.rollout_logp) - far).abs().max()) > 100 * EXACT
        assert compare(weights.digest(), await engine.fingerprints(TIMEOUT_S)) == []
        await engine._call("megarl_corrupt", "adapter", timeout_s=TIMEOUT_S)
        [fault] = compare(prints.digest(), await engine.adapter_fingerprints(TIMEOUT_S))
        assert fault == f"{PEFT}model.layers.1.self_attn.q_proj.lora_B.weight"
    finally:
        await engine.close()


@pytest.mark.long
def test_an_adapter_gives_what_merged_weights_give(host: Host, tmp_path: Path) -> None:
    """Greedy tokens and log-probs, adapter after adapter: none finds the prefixes that another has computed."""
    build(tmp_path / "qwen3", **SIZES, seed=1, family="qwen3", initializer_range=0.1)
    host.run(_adapters, tmp_path / "qwen3")


def test_adapters_alone_are_refused_where_they_have_not_been_shown(tmp_path: Path) -> None:
    for family in ("qwen3", "qwen3_moe"):
        build(tmp_path / family, **SIZES, seed=1, family=family)
    refused: list[tuple[str, list[str], str]] = [
        ("qwen3", ["model.lora=null"], r"^sync\.adapters=true: model\.lora is null"),
        ("qwen3_moe", [], r"^sync\.adapters=true: has not been shown for qwen3_moe, only for qwen3$"),
        ("qwen3", ["rollout.dtype=bfloat16"], r"^sync\.adapters=true: has been shown on CPU engines in float32 alone"),
        ("qwen3", ["model.lora.targets=[attention]"], r"^sync\.adapters=true: has been shown with adapters of all linear layers"),
        ("qwen3", ["rollout.tp=2"], r"^sync\.adapters=true: not with rollout\.dp\*rollout\.tp=2, which has not been shown$"),
        ("qwen3", ["rollout.mode=free", "train.old_logp=rollout", "rollout.max_lag=1"], r"not with rollout\.mode=free, which"),
    ]
    for family, given, message in refused:
        config = load(
            ROOT / "examples/quickstart/lora.yaml", ["sync.adapters=true", f"model.path={tmp_path / family}", *given], TrainConfig
        )
        with pytest.raises(ConfigError, match=message):
            check_adapters(config, ModelDescription.read(tmp_path / family))
