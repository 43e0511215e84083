"""Engines that draft with a model's multi-token prediction layer: their samples and log-probs are those of the model, their drafts' weights
those that were sent."""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config import ConfigError, TrainRolloutSettings
from megarl.engines.engine import Setup
from megarl.engines.generate import Sampling, TokenPrompt
from megarl.engines.registry import check_engine
from megarl.models.description import ModelDescription
from megarl.sync.fingerprint import compare
from tests.engines.engine_host import Host
from tests.engines.test_families import SIZES, stored
from tests.engines.test_updates import Corruptible
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S, Trainer, assert_greedy, generate, logp
from tools.check_logits import transformers_model
from tools.make_tiny_model import build

DRAFTED = "model.layers.2."
SAMPLES = 3000  # of two tokens
LONGEST = 24


def settings(tokens: int | None, **changes: Any) -> TrainRolloutSettings:
    given = {"max_prompt_tokens": 32, "max_response_tokens": LONGEST, "timeout_s": TIMEOUT_S, "kv_cache_mb": 64, **changes}
    return TrainRolloutSettings(speculative=tokens, **given)


def model(path: Path, seed: int) -> Path:
    """A tiny model whose next token follows mostly from the last one, and whose layer of multi-token prediction knows that."""
    build(path, **SIZES, seed=seed, family="deepseek_v3", num_nextn_predict_layers=1)
    tensors = load_file(path / "model.safetensors")
    weak = {name: 0.1 * one for name, one in tensors.items() if name.endswith(("o_proj.weight", "down_proj.weight"))}
    tensors |= {**weak, "lm_head.weight": 4 * tensors["lm_head.weight"]}
    layer = {name.replace(".layers.1.", ".layers.2."): one.clone() for name, one in tensors.items() if ".layers.1." in name}
    width = SIZES["hidden"]
    noise = 0.001 * torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    layer |= {f"{DRAFTED}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm")}
    layer |= {f"{DRAFTED}shared_head.norm.weight": tensors["model.norm.weight"].clone()}
    layer |= {f"{DRAFTED}eh_proj.weight": torch.cat([0.06 * torch.eye(width), noise], 1)}
    save_file({**tensors, **layer}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def reference(path: Path) -> Any:
    """transformers' model, which has no such layer."""
    bare = path.with_name(f"{path.name}-bare")
    if not bare.exists():
        shutil.copytree(path, bare)
        tensors = {name: one for name, one in load_file(path / "model.safetensors").items() if not name.startswith(DRAFTED)}
        save_file(tensors, bare / "model.safetensors", metadata={"format": "pt"})
    return transformers_model(bare).eval()


@torch.no_grad()
def pairs(model: Any, prompt: list[int]) -> Tensor:
    """The probability of each pair of next tokens, [V, V]."""
    first_V = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    texts = torch.tensor([[*prompt, token] for token in range(len(first_V))])
    second_VV = torch.cat([model(part).logits[:, -1].double().softmax(-1) for part in texts.split(64)])
    return first_V[:, None] * second_VV


def chi_square(counts: Counter[tuple[int, int]], p_VV: Tensor) -> tuple[float, int]:
    """Pearson's statistic of the pairs that are expected at least five times, and all others together; its degrees of freedom."""
    expected = SAMPLES * p_VV
    often = (expected >= 5).nonzero().tolist()
    seen, wanted = [counts[a, b] for a, b in often], [float(expected[a, b]) for a, b in often]
    seen.append(SAMPLES - sum(seen))
    wanted.append(SAMPLES - sum(wanted))
    return sum((one - other) ** 2 / other for one, other in zip(seen, wanted, strict=True)), len(wanted) - 1


async def _drafts(first: Path, second: Path, temperatures: Sequence[float]) -> dict[str, float]:
    engine, shares = Corruptible("engine 0"), dict[str, float]()
    await engine.start(Setup(first, "float32", settings(1), 1, gpu=False, report_experts=True))
    try:
        trainer = Trainer(engine, "shm")
        try:
            for name, path in (("loaded", first), ("updated", second), ("again", first)):
                if name != "loaded":
                    digest = await trainer.update(stored(path))
                    assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == []
                ours, chosen = reference(path), list[Tensor]()
                for layer in ours.model.layers:
                    if hasattr(layer.mlp, "gate"):
                        layer.mlp.gate.register_forward_hook(lambda gate, given, out, chosen=chosen: chosen.append(out[2]))
                await engine.drafted(TIMEOUT_S)
                greedy = await generate(engine, PROMPTS, Sampling(n=1, temperature=0.0, max_tokens=LONGEST, seed=0))
                for prompt, answer in zip(PROMPTS, greedy, strict=True):
                    [sample] = answer.samples
                    assert_greedy(ours, sample.tokens[sample.prompt_length :].tolist(), prompt.tokens, LONGEST, 1)
                    assert sample.routed_experts is not None and len(sample.routed_experts) == len(sample.tokens) - 1
                drafted, accepted = await engine.drafted(TIMEOUT_S)
                shares[name] = accepted / drafted
                for temperature in temperatures:
                    answers = await generate(engine, PROMPTS, Sampling(n=8, temperature=temperature, max_tokens=LONGEST, seed=2))
                    samples = [sample for answer in answers for sample in answer.samples]
                    for one in samples:
                        chosen.clear()
                        expected = logp(ours, one.tokens.tolist(), one.prompt_length, temperature)
                        assert float((torch.from_numpy(one.rollout_logp) - expected).abs().max()) <= 3e-5
                        assert one.routed_experts is not None
                        experts_TLK = torch.stack(chosen, 1)[:-1].sort(-1).values.numpy()
                        reported_TLK = np.sort(one.routed_experts[:, -len(chosen) :])  # the first layer is dense
                        assert np.array_equal(experts_TLK, reported_TLK), "also behind drafts that were rejected"
                drafted, accepted = await engine.drafted(TIMEOUT_S)
                shares[f"{name}, sampled"] = accepted / drafted
            prompt = TokenPrompt(0, [5, 6, 7, 8])
            [answer] = await generate(engine, [prompt], Sampling(n=SAMPLES, temperature=1.0, max_tokens=3, seed=3))
            counts = Counter((int(one.tokens[4]), int(one.tokens[5])) for one in answer.samples if len(one.tokens) > 5)
            p_VV = pairs(reference(first), prompt.tokens)
            p_VV[1] = 0  # the end token
            shares["chi-square"], shares["freedom"] = chi_square(counts, p_VV)
            for what, name in (("draft_projection", "eh_proj.weight"), ("draft_bias", "mlp.gate.e_score_correction_bias")):
                await engine._call("megarl_corrupt", what, timeout_s=TIMEOUT_S)
                faults = compare(digest, await engine.fingerprints(TIMEOUT_S))
                assert any(fault.startswith(DRAFTED + name) for fault in map(str, faults)), faults
                await trainer.update(stored(first))
        finally:
            trainer.close()
    finally:
        await engine.close()
    return shares


@pytest.mark.long
def test_an_engine_that_drafts_samples_as_one_that_does_not(host: Host, tmp_path: Path) -> None:
    """Greedy tokens, log-probs and experts are transformers', before and after updates of all weights; so is the distribution of the first
    two tokens of 3000 responses at temperature 1, by Pearson's statistic, at four standard deviations."""
    first, second = (model(tmp_path / str(seed), seed) for seed in (1, 2))
    shares = host.run(_drafts, first, second, (1.0, 0.7))
    assert min(shares[name] for name in ("loaded", "updated", "again")) > 0.2 and 0 < shares["again, sampled"] < 1
    assert shares["loaded"] == shares["again"]
    freedom = shares["freedom"]
    assert freedom > 20 and shares["chi-square"] < freedom + 4 * (2 * freedom) ** 0.5


def test_drafts_are_refused_where_they_have_not_been_shown(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "qwen3_next"):
        build(tmp_path / family, **SIZES, seed=1, family=family)
    known, other = (ModelDescription.read(tmp_path / family, mtp="train") for family in ("deepseek_v3", "qwen3_next"))
    check_engine(known, "float32", settings(1), gpu=False)
    refused = [
        (known.trunk, settings(1), False, r"^rollout\.speculative=1: engines draft with the layer .* that model\.mtp=train trains$"),
        (
            ModelDescription.read(tmp_path / "qwen3_next", mtp="train"),
            settings(2),
            False,
            r"^rollout\.speculative=2: not shown for Qwen3Next",
        ),
        (known, settings(3), False, r"^rollout\.speculative=3: has been shown with 1 token at a time$"),
        (known, settings(1, kv_cache_mb=None), True, r"^rollout\.speculative=1: has not been shown on GPUs"),
        (known, settings(1, tp=2), False, r"^rollout\.speculative=1: has not been shown with rollout\.dp\*rollout\.tp=2$"),
        (known, settings(1, mode="ahead"), False, r"^rollout\.speculative=1: has not been shown with rollout\.mode=ahead$"),
        (known, settings(1, quantization="fp8"), False, r"^rollout\.speculative=1: has not been shown with rollout\.quantization=fp8$"),
        (
            known,
            settings(1, request_routing="affinity"),
            False,
            r"^rollout\.request_routing=affinity: rollout\.speculative=1 leaves no prefix cache$",
        ),
        (known, settings(1, top_p=0.9), False, r"^rollout\.speculative=1: has not been shown with rollout\.top_p=0\.9$"),
    ]
    with pytest.raises(ConfigError, match=r"^rollout\.speculative=1: has been shown in float32, and rollout\.dtype is bfloat16$"):
        check_engine(known, "bfloat16", settings(1), gpu=False)
    for described, given, gpu, message in refused:
        with pytest.raises(ConfigError, match=message):
            check_engine(described, "float32", given, gpu=gpu)
