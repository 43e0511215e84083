"""Engines serve the other families too: what is sent is what they hold, and what they say afterwards is transformers' answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import ConfigError
from megarl.engines.engine import Engine, Setup
from megarl.engines.generate import Generated, Sampling, TokenPrompt
from megarl.engines.registry import check_engine
from megarl.models.description import ModelDescription
from megarl.models.hf import Checkpoint
from megarl.sync.fingerprint import compare
from megarl.upstream.expect import expect
from tests.engines.engine_host import Host
from tests.engines.test_fp8 import digest_of
from tests.engines.test_sleep import CACHE_MB, bits, memory_mb
from tests.engines.test_updates import DP2_TP2_EP, EP2, ONE, SETTINGS, TWO, Corruptible, Layout, _check_update, _start, check_plan
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S, Trainer, generate, logp
from tests.published_form import published
from tests.rows import rows
from tools.check_logits import order_indexers, transformers_model
from tools.make_tiny_model import build, has_experts

SIZES = {"layers": 2, "hidden": 128, "experts": 8, "expert_hidden": 64}
DEEP = {"nemotron_h": {"layers": 4}}  # families of which fewer layers are not a layer of each kind
SAMPLING = Sampling(n=1, temperature=0.0, max_tokens=4, seed=0)
SAMPLED = Sampling(n=4, temperature=1.0, max_tokens=24, seed=3)
FUSED = "model.layers.1.self_attn.qkv_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def other(path: Path, family: str, seed: int = 2) -> Any:
    """transformers' model of another seed, sharper than the one that the engine starts with."""
    restore_configurations()
    build(path, **{**SIZES, **DEEP.get(family, {})}, seed=seed, family=family, initializer_range=0.12)
    return transformers_model(path).eval()


def stored(path: Path, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """As a trainer of that dtype exports it: experts one by one, though a checkpoint may stack them."""
    with Checkpoint(path) as checkpoint:
        tensors = [(name, checkpoint.read(name)) for name in checkpoint.tensors]
    return [(name, tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)) for name, tensor in tensors]


def _restore_model_type() -> None:
    """Give transformers' DeepseekV3Config its own model_type again.

    vLLM 0.30.0 reads `kimi_k2` by that class and changes its model_type in the whole process (vllm/transformers_utils/config.py:188), after
    which transformers writes and reads no DeepSeek-V3 as its checkpoints are: the experts are stacked, under names that no engine knows.
    """
    from transformers import DeepseekV3Config
    from vllm.transformers_utils.config import _register_config_class

    expect(_register_config_class, "config_class.model_type = model_type")
    DeepseekV3Config.model_type = "deepseek_v3"


def restore_configurations() -> None:
    """Let transformers read some config.json with its own classes again: vLLM has registered others for them
    (vllm/transformers_utils/config.py:103), of DeepSeek-V3.2 one without an indexer, of Qwen3.5 its own."""
    from transformers import CONFIG_MAPPING

    for kind in ("deepseek_v32", "qwen3_5", "qwen3_5_moe"):
        CONFIG_MAPPING._extra_content.pop(kind, None)


async def _follows(tmp_path: Path, family: str) -> None:
    restore_configurations()
    build(tmp_path / "model", **{**SIZES, **DEEP.get(family, {})}, seed=1, family=family)
    engine = await _start(tmp_path / "model", blank=True)
    _restore_model_type()
    try:
        model = other(tmp_path / "other", family)
        await _check_update(engine, Trainer(engine, "shm"), model, stored(tmp_path / "other"))
        routed = (await generate(engine, PROMPTS, SAMPLING))[0].samples[0].routed_experts
        assert (routed is not None) == has_experts(family)
    finally:
        await engine.close()


# What runs without --long. A new family joins the names in the parametrization below.
LONG = (
    "qwen3",
    "llama",
    "mistral",
    "ministral",
    "deepseek_v3",
    "kimi_k2",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe_lite",
    "minimax_m2",
    "qwen2_moe",
    "olmoe",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5",
    "gpt_oss",
    "granite",
    "granitemoe",
    "ernie4_5_moe",
    "nemotron_h",
    "mixtral",
    "glm4_moe",
)
SUITE = ("qwen2_tied", "moonlight")


@pytest.mark.parametrize("family", rows((*LONG, *SUITE), SUITE))
def test_an_engine_of_another_family_follows_an_update(host: Host, tmp_path: Path, family: str) -> None:
    host.run(_follows, tmp_path, family)


async def _of_text(tmp_path: Path) -> None:
    build(tmp_path / "text", **SIZES, seed=1, family="qwen3_5_moe")
    published(tmp_path / "text", tmp_path / "whole")
    engine = await _start(tmp_path / "whole", drop_images=True)
    try:
        assert compare(digest_of(stored(tmp_path / "text")), await engine.fingerprints(TIMEOUT_S)) == [], "as it has read it"
        await _check_update(engine, Trainer(engine, "shm"), other(tmp_path / "other", "qwen3_5_moe"), stored(tmp_path / "other"))
    finally:
        await engine.close()


@pytest.mark.long
def test_an_engine_has_the_language_model_of_one_that_sees_images(host: Host, tmp_path: Path) -> None:
    host.run(_of_text, tmp_path)


WINDOW = 12  # tokens; the prompts below are longer, and the engine's blocks too
# Variant -> family, and what its config.json has otherwise. All layers have a window, but for those of Ministral and gpt-oss.
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "ministral": ("ministral", {}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
}


async def _assert_alone_fits(engine: Engine, model: Any, other: Callable[[], None]) -> None:
    """The engine's log-probs are those of the model, and not of what `other` makes of it."""
    drawn = torch.Generator().manual_seed(5)
    prompts = [TokenPrompt(n, torch.randint(2, 128, (length,), generator=drawn).tolist()) for n, length in enumerate((9, 20, 31))]
    sampled = await generate(engine, prompts, Sampling(n=2, temperature=1.0, max_tokens=24, seed=1))
    samples = [sample for answer in sampled for sample in answer.samples]

    def by_the_model() -> list[torch.Tensor]:
        return [logp(model, sample.tokens.tolist(), sample.prompt_length, 1.0) for sample in samples]

    theirs = by_the_model()
    gap = max(float((torch.from_numpy(sample.rollout_logp) - one).abs().max()) for sample, one in zip(samples, theirs, strict=True))
    other()
    assert gap < 1e-4 and max(float((one - two).abs().max()) for one, two in zip(theirs, by_the_model(), strict=True)) > 100 * gap


async def _windows(tmp_path: Path, variant: str) -> None:
    from transformers import AutoModelForCausalLM

    family, changes = WINDOWS[variant]
    build(tmp_path / "model", **SIZES, seed=1, family=family, initializer_range=0.12, **changes)
    engine = await _start(tmp_path / "model")
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()

        def widen() -> None:
            model.config.sliding_window = WINDOW + 1
            for layer in model.model.layers:
                layer.self_attn.sliding_window = WINDOW + 1

        await _assert_alone_fits(engine, model, widen)
    finally:
        await engine.close()


@pytest.mark.parametrize("variant", rows(tuple(WINDOWS), ("ministral",)))
def test_an_engine_sees_the_window_that_the_model_has(host: Host, tmp_path: Path, variant: str) -> None:
    """Of transformers' model, of which the trainer's is one, and not one token more."""
    host.run(_windows, tmp_path, variant)


async def _chosen(tmp_path: Path, family: str, heads: int) -> None:
    from transformers import AutoModelForCausalLM

    restore_configurations()
    build(tmp_path / "model", **SIZES, seed=1, family=family, initializer_range=0.12, index_n_heads=heads)
    engine = await _start(tmp_path / "model")
    try:
        restore_configurations()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
        ties = order_indexers(model)

        def choose_more() -> None:
            assert sum(ties) > 0 or heads != FEW_HEADS
            for layer in model.model.layers:
                layer.self_attn.indexer.index_topk += 1

        await _assert_alone_fits(engine, model, choose_more)
    finally:
        await engine.close()


HEADS, FEW_HEADS = 64, 3  # with so few, the products of all of them are negative for one key in eight, whose score is exactly 0


@pytest.mark.parametrize(
    ("family", "heads"),
    rows((("deepseek_v32", HEADS), ("deepseek_v32", FEW_HEADS), ("glm_moe_dsa", HEADS)), (("deepseek_v32", FEW_HEADS),)),
)
def test_an_engine_attends_to_the_keys_that_the_model_chooses(host: Host, tmp_path: Path, family: str, heads: int) -> None:
    """Of prompts and of responses longer than index_topk, and not to one key more; of keys of equal scores to the earliest."""
    host.run(_chosen, tmp_path, family, heads)


def test_windows_in_some_layers_of_a_qwen2_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    build(tmp_path / "model", **SIZES, seed=1, family="qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    with pytest.raises(ConfigError, match=r"^model\.path: config\.json has sliding windows in some layers only, which vLLM's Qwen2"):
        check_engine(ModelDescription.read(tmp_path / "model"), "float32", SETTINGS, gpu=False)


async def _fused(tmp_path: Path, tp: int) -> None:
    build(tmp_path / "model", **SIZES, seed=1, family="phi3")
    engine = await _start(tmp_path / "model", layout=Layout(tp), blank=True)
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
        await check_plan(engine, tmp_path / "model", Layout(tp))
    finally:
        trainer.close()
        await engine.close()


@pytest.mark.parametrize("tp", rows([1, 2], [2]))
def test_a_tensor_of_several_projections_follows_updates_on_any_rank(host: Host, tmp_path: Path, tp: int) -> None:
    host.run(_fused, tmp_path, tp)


async def _stacked(tmp_path: Path, layout: Layout, dtype: str) -> None:
    build(tmp_path / "model", **SIZES, seed=1, family="gpt_oss")
    engine = await _start(tmp_path / "model", dtype, layout, blank=True)
    trainer = Trainer(engine, "gloo", layout.workers)
    try:
        model = other(tmp_path / "other", "gpt_oss")
        tensors = stored(tmp_path / "other", getattr(torch, dtype))
        if dtype == "float32":
            await _check_update(engine, trainer, model, tensors)
        for what, name in (("sinks", "self_attn.sinks"), ("kernel_bias", "mlp.experts.5.gate_up_proj_bias")):
            digest = await trainer.update(tensors)
            assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == []
            await engine._call("megarl_corrupt", what, timeout_s=TIMEOUT_S)
            assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == [f"model.layers.1.{name}"]
        await trainer.update(tensors)
        first, held = bits(await generate(engine, PROMPTS, SAMPLING)), await engine.fingerprints(TIMEOUT_S)
        for keep_weights in (True, False):
            await engine.sleep(TIMEOUT_S, keep_weights=keep_weights)
            await engine.wake("weights", TIMEOUT_S)
            if not keep_weights:
                await trainer.update(tensors)
            await engine.wake("kv_cache", TIMEOUT_S)
            assert await engine.fingerprints(TIMEOUT_S) == held
            assert bits(await generate(engine, PROMPTS, SAMPLING)) == first
    finally:
        trainer.close()
        await engine.close()


@pytest.mark.parametrize(
    ("layout", "dtype"),
    rows(
        [(ONE, "float32"), (ONE, "bfloat16"), (TWO, "float32"), (EP2, "bfloat16"), (DP2_TP2_EP, "float32")],
        [(ONE, "float32")],
    ),
)
def test_sinks_and_the_biases_of_stacked_experts_follow_updates_and_sleep(host: Host, tmp_path: Path, layout: Layout, dtype: str) -> None:
    """On each layout of an engine; a changed sink or bias is named, also where only the kernel reads it."""
    host.run(_stacked, tmp_path, layout, dtype)


HYBRID = ("qwen3_next", "qwen3_5", "nemotron_h")  # families whose layers have a state beside a cache of keys and values


def _said(generated: list[Generated]) -> tuple[list[bytes], Tensor]:
    """The tokens of each sample, and the log-probs of all."""
    samples = [sample for answer in generated for sample in answer.samples]
    return [sample.tokens.tobytes() for sample in samples], torch.cat([torch.from_numpy(sample.rollout_logp) for sample in samples])


async def _states(tmp_path: Path, family: str) -> None:
    build(tmp_path / "model", **{**SIZES, **DEEP.get(family, {})}, seed=1, family=family)
    model, tensors = other(tmp_path / "other", family), stored(tmp_path / "other")
    third = other(tmp_path / "third", family, seed=3)
    engine = Corruptible("engine 0")
    settings = SETTINGS.model_copy(update={"kv_cache_mb": CACHE_MB})
    pids = await engine.start(Setup(tmp_path / "model", "float32", settings, 1, gpu=False, report_experts=True, sleeps=True))
    trainer = Trainer(engine, "shm")
    try:
        await _check_update(engine, trainer, model, tensors)
        held, (tokens, logp) = await engine.fingerprints(TIMEOUT_S), _said(await generate(engine, PROMPTS, SAMPLED))
        for keep_weights in (True, False, True):
            awake_mb = memory_mb(pids)
            await engine.sleep(TIMEOUT_S, keep_weights=keep_weights)
            assert awake_mb - memory_mb(pids) >= CACHE_MB
            await engine.wake("weights", TIMEOUT_S)
            if not keep_weights:
                await trainer.update(tensors)
            await engine.wake("kv_cache", TIMEOUT_S)
            assert await engine.fingerprints(TIMEOUT_S) == held
            tokens_again, logp_again = _said(await generate(engine, PROMPTS, SAMPLED))
            assert tokens_again == tokens and float((logp_again - logp).abs().max()) <= 1e-5
        await engine.sleep(TIMEOUT_S, keep_weights=False)
        await engine.wake("weights", TIMEOUT_S)
        await engine.wake("kv_cache", TIMEOUT_S)
        await _check_update(engine, trainer, third, stored(tmp_path / "third"))
    finally:
        trainer.close()
        await engine.close()


@pytest.mark.parametrize("family", rows(HYBRID, ()))
def test_states_are_free_while_an_engine_sleeps_and_nothing_else_changes(host: Host, tmp_path: Path, family: str) -> None:
    """Of gated delta nets and Mamba mixers, as keys and values; with the weights kept, or dropped and sent again."""
    host.run(_states, tmp_path, family)


async def _spread(tmp_path: Path, family: str, layout: Layout, dtype: str) -> None:
    restore_configurations()
    build(tmp_path / "model", **{**SIZES, **DEEP.get(family, {})}, seed=1, family=family)
    engine = await _start(tmp_path / "model", dtype, layout, blank=True)
    trainer = Trainer(engine, "gloo", layout.workers)
    try:
        model = other(tmp_path / "other", family)
        tensors = stored(tmp_path / "other", getattr(torch, dtype))
        if dtype == "float32":
            await _check_update(engine, trainer, model, tensors)
            return
        assert compare(await trainer.update(tensors), await engine.fingerprints(TIMEOUT_S)) == []
        sampled = await generate(engine, PROMPTS, Sampling(n=2, temperature=1.0, max_tokens=24, seed=1))
        for sample in (sample for answer in sampled for sample in answer.samples):
            theirs = logp(model, sample.tokens.tolist(), sample.prompt_length, 1.0)
            assert float((torch.from_numpy(sample.rollout_logp) - theirs).abs().median()) < 0.2
    finally:
        trainer.close()
        await engine.close()


@pytest.mark.long
@pytest.mark.parametrize(("layout", "dtype"), [(TWO, "float32"), (EP2, "float32"), (ONE, "bfloat16")])
@pytest.mark.parametrize("family", ["ernie4_5_moe", "deepseek_v32", "granitemoe", "nemotron_h"])
def test_an_engine_of_several_workers_or_of_bfloat16_follows_an_update(
    host: Host, tmp_path: Path, family: str, layout: Layout, dtype: str
) -> None:
    """In bfloat16 its log-probs are near those of the model in float32."""
    host.run(_spread, tmp_path, family, layout, dtype)


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


@pytest.mark.parametrize("dtype", rows(["float32", "bfloat16"], ["bfloat16"]))
def test_an_expert_bias_is_float32_in_every_engine_and_checked(host: Host, tmp_path: Path, dtype: str) -> None:
    host.run(_bias, tmp_path, dtype)


async def _latents(tmp_path: Path) -> list[list[str]]:
    """What differs after an update, and after what the engine made of it was changed."""
    published = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    for seed, name in ((1, "model"), (2, "other")):
        build(tmp_path / name, **SIZES, seed=seed, family="deepseek_v3", **published)
    latent = await _start(tmp_path / "model", blank=True)
    try:
        digest = await Trainer(latent, "shm").update(stored(tmp_path / "other"))
        updated = compare(digest, await latent.fingerprints(TIMEOUT_S))
        await latent._call("megarl_corrupt", "absorbed", timeout_s=TIMEOUT_S)
        return [updated, compare(digest, await latent.fingerprints(TIMEOUT_S))]
    finally:
        await latent.close()


def test_what_latent_attention_makes_of_a_weight_is_held_against_it(host: Host, tmp_path: Path) -> None:
    assert host.run(_latents, tmp_path) == [[], ["model.layers.1.self_attn.mla_attn.mla_attn.W_UV"]]
