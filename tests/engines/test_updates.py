"""Weight updates: what the engine holds and says afterwards is what was sent, and every fault is named."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import RolloutSettings
from megarl.engines.engine import RolloutError, Setup, WeightSyncError
from megarl.engines.generate import Generated, Sampling
from megarl.engines.vllm.engine import VllmEngine
from megarl.engines.vllm.member import VllmMember
from megarl.models.description import ModelDescription
from megarl.plan.engines import cache_bytes, engine_weights
from megarl.plan.facts import facts
from megarl.sync import receive, wire
from megarl.sync.fingerprint import compare
from megarl.sync.receive import BucketReceiver, Inventory, WeightError
from tests.engines.engine_host import Host
from tests.engines.gathered import GatheredEngine
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S, Trainer, assert_greedy, checkpoint, generate, logp, other_weights
from tests.rows import rows

SETTINGS = RolloutSettings(max_prompt_tokens=32, max_response_tokens=24, timeout_s=TIMEOUT_S, kv_cache_mb=64)
END = 1
CPU_BLOCK = 128  # tokens (vllm/platforms/cpu.py)


EXTENSION = "tests.engines.corrupting_extension.CorruptingExtension"


class CorruptibleMember(VllmMember):
    extension = EXTENSION


class Corruptible(GatheredEngine):
    extension = EXTENSION
    member = CorruptibleMember


@dataclass(frozen=True)
class Layout:
    """Of an engine."""

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    @property
    def workers(self) -> int:
        return self.tp * self.dp


ONE, TWO, EP2, DP2_EP, DP2_TP2_EP = Layout(), Layout(tp=2), Layout(2, 1, True), Layout(1, 2, True), Layout(2, 2, True)
DP3_EP = Layout(1, 3, True)  # of 8 experts the devices have 3, 3 and 2
LAYOUTS = [ONE, TWO, EP2, Layout(dp=2), DP2_EP, Layout(2, 2), DP2_TP2_EP, DP3_EP]


async def _start(
    tiny: Path, dtype: str = "float32", layout: Layout = ONE, blank: bool = False, kind: type[Corruptible] = Corruptible, **more: Any
) -> Corruptible:
    engine, settings = kind("engine 0"), SETTINGS.model_copy(update=asdict(layout))
    await engine.start(Setup(tiny, dtype, settings, 1, gpu=False, report_experts=True, blank=blank, **more))
    return engine


@asynccontextmanager
async def _engine_and_trainer(
    tiny: Path,
    transport: str = "shm",
    dtype: str = "float32",
    layout: Layout = ONE,
    blank: bool = False,
    kind: type[Corruptible] = Corruptible,
) -> AsyncIterator[tuple[Corruptible, Trainer]]:
    """An engine, and a trainer that sends it weights; both are closed afterwards."""
    engine = await _start(tiny, dtype, layout, blank, kind)
    try:
        trainer = Trainer(engine, transport, layout.workers)
        try:
            yield engine, trainer
        finally:
            trainer.close()
    finally:
        await engine.close()


def assert_all_greedy(model: Any, generated: Sequence[Generated]) -> None:
    for prompt, answer in zip(PROMPTS, generated, strict=True):
        [sample] = answer.samples
        assert sample.tokens[: sample.prompt_length].tolist() == prompt.tokens
        assert_greedy(model, sample.tokens[sample.prompt_length :].tolist(), prompt.tokens, 24, END)


async def _check_update(engine: VllmEngine, trainer: Trainer, model: Any, tensors: list[tuple[str, Tensor]] | None = None) -> None:
    """After an update with the weights of `model` (`tensors`: as a checkpoint names them) every fingerprint, every greedy token and every
    log-prob agrees."""
    digest = await trainer.update(tensors or checkpoint(model))
    assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == []
    generated = await generate(engine, PROMPTS, Sampling(n=1, temperature=0.0, max_tokens=24, seed=0))
    assert_all_greedy(model, generated)
    sampled = await generate(engine, PROMPTS, Sampling(n=4, temperature=0.7, max_tokens=24, seed=1))
    gaps = [
        (torch.from_numpy(sample.rollout_logp) - logp(model, sample.tokens.tolist(), sample.prompt_length, 0.7)).abs()
        for answer in sampled
        for sample in answer.samples
    ]
    assert float(torch.cat(gaps).mean()) <= 1e-5 and float(torch.cat(gaps).max()) <= 1e-3


async def check_plan(engine: VllmEngine, path: Path, layout: Layout) -> None:
    """The fullest worker holds as many bytes of weights as `megarl plan` says, and its cache as many tokens. The others hold as much,
    unless the experts do not divide.
    """
    model, tp = ModelDescription.read(path), layout.tp
    workers = await engine._call("megarl_fingerprints", False, timeout_s=TIMEOUT_S)
    counts = [sum(rows * columns for places in held.values() for _, _, rows, columns, *_ in places) for held in workers]
    planned = engine_weights(model, tp, "float32", layout.dp, expert_parallel=layout.expert_parallel)
    assert planned == pytest.approx(4 * max(counts), rel=0.05)
    assert len(counts) == layout.workers and (max(counts) == min(counts)) == (layout.workers != 3)
    tokens = engine._llm.vllm_config.cache_config.num_gpu_blocks // layout.dp * CPU_BLOCK  # vLLM adds up those of all members
    assert SETTINGS.kv_cache_mb is not None
    assert tokens * cache_bytes(facts(model), tp, "float32") == pytest.approx(SETTINGS.kv_cache_mb << 20, rel=0.05)


async def _five_updates(tiny: Path, bare: Path, transport: str, layout: Layout) -> None:
    async with _engine_and_trainer(bare, transport, layout=layout, blank=True) as (engine, trainer):
        with pytest.raises(RolloutError, match=r"^engine 0: has no weights before the next update$"):
            await generate(engine, PROMPTS, Sampling(n=1, temperature=0.0, max_tokens=2, seed=0))
        for seed in (1, 2, 3, 1, 4):
            await _check_update(engine, trainer, other_weights(tiny, seed))
        last = await generate(engine, PROMPTS, Sampling(n=1, temperature=0.0, max_tokens=2, seed=0))
        assert {answer.samples[0].weight_versions[0].version for answer in last} == {5}
        await check_plan(engine, tiny, layout)


@pytest.mark.parametrize(
    ("transport", "layout"),
    rows(
        [*(("gloo", layout) for layout in LAYOUTS), ("shm", ONE), ("shm", DP2_TP2_EP)],
        [("gloo", TWO)],
    ),
)
def test_greedy_output_equals_transformers_over_five_updates(
    host: Host, tiny: Path, tmp_path: Path, transport: str, layout: Layout
) -> None:
    """Of an engine that has read no weights before, as the directory has none."""
    bare = shutil.copytree(tiny, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    host.run(_five_updates, tiny, bare, transport, layout)


async def _changes(tiny: Path, layout: Layout, overlap: bool) -> None:
    engine = await _start(tiny, layout=layout)
    trainer = Trainer(engine, "gloo", layout.workers, delta=3, overlap=overlap)
    try:
        model, moved = other_weights(tiny, 1), list[tuple[int, int]]()
        for seed in range(4):
            with torch.no_grad():
                for weight in model.parameters():
                    flat = weight.view(-1)
                    flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed))[: -(-len(flat) // 50)]] *= -1.5
            await _check_update(engine, trainer, model)
            moved.append((trainer.moved.nbytes, trainer.moved.changed))
    finally:
        trainer.close()
        await engine.close()
    (whole, elements), (less, changed), again, _ = moved
    assert again == (whole, elements) and changed == pytest.approx(elements / 50, rel=0.01) and less < 0.1 * whole


@pytest.mark.parametrize(("layout", "overlap"), rows([(EP2, True), (DP3_EP, False), (TWO, False)], [(EP2, True)]))
def test_an_engine_that_is_sent_changes_answers_as_transformers_does(host: Host, tiny: Path, layout: Layout, overlap: bool) -> None:
    """Received beside its work or in a pause; the first and the third update bring everything."""
    host.run(_changes, tiny, layout, overlap)


def test_memory_that_is_not_shared_is_refused_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another machine, or of another GPU of this one: neither a path nor a handle means anything there."""
    bucket = wire.Bucket(torch.zeros(64, dtype=torch.uint8))
    bucket.add("norm", torch.ones(4))
    receiver = BucketReceiver(torch.device("cpu"))
    with pytest.raises(WeightError, match=r"^sync\.transport=shm: .* the trainer's is on other, this worker's on [0-9a-f-]{36} "):
        receiver.receive([replace(bucket.header(), path="/nowhere", place="other")])
    monkeypatch.setattr(receive, "place_of", lambda device: "host/GPU-1")
    with pytest.raises(WeightError, match=r"^sync\.transport=cuda_ipc: .* trainer's is on host/GPU-2, this worker's on host/GPU-1 "):
        receiver.receive([replace(bucket.header(), handle=["opened, it would fail otherwise"], place="host/GPU-2")])


async def _frugal(tiny: Path, tp: int) -> None:
    engine = await _start(tiny, layout=Layout(tp))
    try:
        await engine.fingerprints(TIMEOUT_S)  # where the packing puts each element is learnt once
        for peak, layer in await engine._call("megarl_peak", False, timeout_s=TIMEOUT_S):
            assert 0 < peak < layer, f"{peak} bytes: no layer's experts are unpacked"
        assert all(await engine._call("megarl_temporary", timeout_s=TIMEOUT_S))
    finally:
        await engine.close()


@pytest.mark.parametrize("tp", rows([1, 2], [2]))
def test_fingerprints_take_little_memory_and_a_started_engine_has_a_temporary_directory(host: Host, tiny: Path, tp: int) -> None:
    host.run(_frugal, tiny, tp)


async def _tied(tiny: Path, tied: Path, dtype: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tiny, tie_word_embeddings=True, moe_intermediate_size=40)  # 40: the expert kernels pad it
    AutoModelForCausalLM.from_config(config).save_pretrained(tied)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tied)
    async with _engine_and_trainer(tied, dtype=dtype) as (engine, trainer):
        for seed in (1, 2):
            model = other_weights(tied, seed, getattr(torch, dtype))
            digest = await trainer.update([(name, weight) for name, weight in checkpoint(model) if name != "lm_head.weight"])
            held = await engine.fingerprints(TIMEOUT_S)
            assert compare(digest, held) == []
            assert len(held["model.embed_tokens.weight"]) == 2  # the table, and the packed output layer
            generated = await generate(engine, PROMPTS, Sampling(n=1, temperature=0.0, max_tokens=24, seed=0))
            if dtype == "float32":
                assert_all_greedy(model, generated)


@pytest.mark.parametrize("dtype", rows(["float32", "bfloat16"], ["float32"]))
def test_tied_embeddings_and_padded_experts_follow_updates(host: Host, tiny: Path, tmp_path: Path, dtype: str) -> None:
    host.run(_tied, tiny, tmp_path, dtype)


async def _fingerprints_follow_bf16(tiny: Path) -> None:
    async with _engine_and_trainer(tiny, dtype="bfloat16") as (engine, trainer):
        for seed in range(1, 6):
            digest = await trainer.update(checkpoint(other_weights(tiny, seed, torch.bfloat16)))
            assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == []


def test_fingerprints_agree_after_five_updates_in_bf16(host: Host, tiny: Path) -> None:
    host.run(_fingerprints_follow_bf16, tiny)


async def _corruptions_are_named(tiny: Path, dtype: str, layout: Layout) -> None:
    tensors = checkpoint(other_weights(tiny, 1, getattr(torch, dtype)))
    weights = dict(tensors)
    experts = [f"model.layers.1.mlp.experts.{e}.{part}_proj.weight" for e in (2, 3) for part in ("down", "gate", "up")]
    cases = {
        "norm": ["model.layers.1.input_layernorm.weight"],
        "q_norm": ["model.layers.1.self_attn.q_norm.weight"],
        "embedding": ["model.embed_tokens.weight"],
        "down": ["model.layers.1.mlp.experts.5.down_proj.weight"],
        "swap": experts,
    }
    async with _engine_and_trainer(tiny, dtype=dtype, layout=layout, transport="gloo") as (engine, trainer):
        for what, names in cases.items():
            digest = await trainer.update(tensors)
            await engine._call("megarl_corrupt", what, timeout_s=TIMEOUT_S)
            assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == names
        if layout == ONE:
            qkv = [weights[f"model.layers.1.self_attn.{part}_proj.weight"].clone() for part in "qkv"]
            qkv[1][63, 127] *= 1.01
            digest = await trainer.update(tensors)
            await engine._call("megarl_corrupt_linear", "self_attn.qkv_proj", torch.cat(qkv).tolist(), timeout_s=TIMEOUT_S)
            assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == ["model.layers.1.self_attn.k_proj.weight"]


@pytest.mark.parametrize(
    ("dtype", "layout"),
    rows(
        [("float32", ONE), ("bfloat16", ONE), ("float32", TWO), ("float32", EP2), ("bfloat16", DP2_EP)],
        [("float32", TWO), ("bfloat16", DP2_EP)],
    ),
)
def test_a_corrupted_spot_is_named(host: Host, tiny: Path, dtype: str, layout: Layout) -> None:
    host.run(_corruptions_are_named, tiny, dtype, layout)


async def _unmended_reload(tiny: Path, dtype: str) -> list[str]:
    from megarl.engines.vllm import weight_loader

    mend, weight_loader.reset_moe_kernels = weight_loader.reset_moe_kernels, lambda model: []  # the engine forks with it
    try:
        engine = await _start(tiny, dtype)
    finally:
        weight_loader.reset_moe_kernels = mend
    try:
        digest = await Trainer(engine, "shm").update(checkpoint(other_weights(tiny, 1, getattr(torch, dtype))))
        return compare(digest, await engine.fingerprints(TIMEOUT_S))
    finally:
        await engine.close()


@pytest.mark.parametrize("dtype", rows(["float32", "bfloat16"], ["bfloat16"]))
def test_upstreams_reload_without_the_mend_is_caught(host: Host, tiny: Path, dtype: str) -> None:
    names = host.run(_unmended_reload, tiny, dtype)
    assert len(names) == 2 * 8 * 3 and all(".mlp.experts." in name for name in names)


async def _faulty_streams(tiny: Path) -> None:
    """Each faulty update is refused by the tensor's name, nothing is generated from its half, and a good one mends all."""
    model = other_weights(tiny, 1)
    tensors = checkpoint(model)
    index = next(i for i, (name, _) in enumerate(tensors) if name == "model.layers.1.mlp.experts.3.up_proj.weight")
    name, weight = tensors[index]
    faults = {
        f"{name}: did not come": tensors[:index] + tensors[index + 1 :],
        f"{name}: came with shape": [*tensors[:index], (name, weight[:-1])],
        f"{name}: came as bfloat16": [*tensors[:index], (name, weight.bfloat16())],
        "model.layers.9.norm.weight: the engine's model has no such tensor": [*tensors[:index], ("model.layers.9.norm.weight", weight)],
    }
    async with _engine_and_trainer(tiny) as (engine, trainer):
        for message, stream in faults.items():
            with pytest.raises(WeightSyncError, match=message):
                await trainer.update(stream)
            with pytest.raises(WeightSyncError, match="not finished"):
                await generate(engine, PROMPTS, Sampling(n=1, temperature=0.0, max_tokens=2, seed=0))
        await _check_update(engine, trainer, model)


def test_faulty_updates_are_refused_by_name_and_mended_by_a_good_one(host: Host, tiny: Path) -> None:
    host.run(_faulty_streams, tiny)


class Heedless(Corruptible):
    """Goes on after a bucket that was refused."""

    async def load_buckets(self, headers: list[dict[str, Any]], timeout_s: float) -> None:
        with suppress(WeightSyncError):
            await super().load_buckets(headers, timeout_s)


async def _failed_load(tiny: Path) -> None:
    model = other_weights(tiny, 1)
    async with _engine_and_trainer(tiny, kind=Heedless) as (engine, trainer):
        await engine._call("megarl_fail_next_load", timeout_s=TIMEOUT_S)
        with pytest.raises(WeightSyncError, match=r"^engine 0: finish: no update has been started, or it failed$"):
            await trainer.update(checkpoint(model))
        await _check_update(engine, trainer, model)


def test_an_update_one_of_whose_buckets_was_not_loaded_is_not_finished(host: Host, tiny: Path) -> None:
    host.run(_failed_load, tiny)


def test_an_update_brings_every_tensor_exactly_once() -> None:
    inventory = Inventory({"a": ([2, 3], "bfloat16"), "b": ([4], "float32")})
    inventory.take("a", torch.Size([2, 3]), "bfloat16")
    for arguments, message in [
        (("a", [2, 3], "bfloat16"), "a: came twice in one update"),
        (("c", [1], "float32"), "c: the engine's model has no such tensor"),
        (("b", [5], "float32"), r"b: came with shape \[5\], and the engine's model has \[4\]"),
        (("b", [4], "bfloat16"), "b: came as bfloat16, and the engine's model has float32"),
    ]:
        with pytest.raises(WeightError, match=message):
            inventory.take(*arguments)
    with pytest.raises(WeightError, match=r"b: did not come \(1 of 2 tensors missing\)"):
        inventory.complete()
    inventory.take("b", [4], "float32")
    inventory.complete()
