"""Engines see images: what they sample after pictures has transformers' log-probs, before and after updates of tower and language model."""

import asyncio
import io
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from megarl.batch import Sample
from megarl.config import RolloutSettings, TrainRolloutSettings
from megarl.engines.engine import Request, Setup
from megarl.engines.generate import Generated, Sampling, TokenPrompt
from megarl.engines.responder import Responder
from megarl.engines.vllm.images import key
from megarl.image_source import ImageGone, ImageSource
from megarl.images import Image, PlacedImage
from megarl.models.image_processor import ImageProcessor
from megarl.sync.fingerprint import compare
from tests.engines.engine_host import Host
from tests.engines.test_families import SIZES, restore_configurations, stored
from tests.engines.test_sleep import bits
from tests.engines.test_updates import EP2, ONE, TWO, Corruptible, Layout
from tests.engines.transformers_reference import TIMEOUT_S, Trainer, generate
from tests.float64 import in_float64
from tests.image_samples import END, PAD, START, image_of, samples
from tests.rows import rows
from tools.check_logits import transformers_model
from tools.make_tiny_model import build, has_experts

SETTINGS = RolloutSettings(max_prompt_tokens=256, max_response_tokens=24, timeout_s=TIMEOUT_S, kv_cache_mb=64)
COUNTS = (2, 0, 1, 3)  # images of each prompt


def prompts(path: Path, seed: int = 3) -> list[TokenPrompt]:
    """Prompts of so many images each, between texts."""
    made = samples(path, COUNTS, seed)
    return [TokenPrompt(n, one.tokens[: one.prompt_length].tolist(), images=one.images) for n, one in enumerate(made)]


async def start(path: Path, layout: Layout = ONE, **changes: Any) -> Corruptible:
    engine = Corruptible("engine 0")
    settings = RolloutSettings.model_validate(SETTINGS.model_dump() | asdict(layout) | changes)
    await engine.start(Setup(path, "float32", settings, 1, gpu=False, report_experts=True, sleeps=True))
    restore_configurations()
    return engine


@torch.no_grad()
def logp(model: Any, processor: ImageProcessor, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """transformers' log-probs of the response's tokens, with pictures cut by `processor`."""
    ids, given = torch.from_numpy(sample.tokens).long()[None], dict[str, torch.Tensor]()
    if sample.images:
        given["pixel_values"] = torch.cat([processor.pixels(placed.image) for placed in sample.images])
        given["image_grid_thw"] = torch.tensor([placed.image.grid for placed in sample.images])
        pads = given["mm_token_type_ids"] = torch.zeros_like(ids, dtype=torch.int32)
        for placed in sample.images:
            pads[0, placed.start : placed.end] = 1
        # An image token that the model has sampled is a token like others; transformers would look for its image.
        model.model.get_placeholder_mask = lambda ids, inputs_embeds, **others: (pads.bool()[..., None].expand_as(inputs_embeds), None)
    logits = model(ids, **given).logits[0, sample.prompt_length - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, sample.prompt_length :, None]).squeeze(1)


def gap(model: Any, path: Path, generated: Sequence[Generated]) -> float:
    """The largest difference between an engine's log-probs and transformers'."""
    processor = ImageProcessor(path)
    return max(
        float((torch.from_numpy(sample.rollout_logp) - logp(model, processor, sample)).abs().max())
        for answer in generated
        for sample in answer.samples
    )


def assert_sees(family: str, weights: Path, path: Path, generated: Sequence[Generated]) -> None:
    """An engine's log-probs are transformers', with `weights`.

    Of gated delta nets, which amplify rounding in anybody's order of operations, the engine's are as near to those in float64 as
    transformers' are in float32: within twice their largest difference.
    """
    if family in ("qwen3_vl_moe", "qwen3_vl"):
        assert gap(transformers_model(weights).eval(), path, generated) < 1e-5
        return
    processor, made = ImageProcessor(path), [sample for answer in generated for sample in answer.samples]
    model = transformers_model(weights).eval()
    near = torch.cat([logp(model, processor, sample) for sample in made])
    with in_float64():
        model = transformers_model(weights, "float64", experts_implementation="eager").eval()
        exact = torch.cat([logp(model, processor, sample) for sample in made])
    assert near.dtype == torch.float32 and exact.dtype == torch.float64
    ours = torch.cat([torch.from_numpy(sample.rollout_logp) for sample in made])
    own, theirs = (float((one.double() - exact).abs().max()) for one in (ours, near))
    assert own <= 2 * theirs + 1e-6, (own, theirs)


async def _follows(tmp_path: Path, family: str, layout: Layout) -> None:
    restore_configurations()
    for name, seed in (("model", 1), ("other", 2)):
        build(tmp_path / name, **SIZES, seed=seed, family=family, initializer_range=0.12)
    given = prompts(tmp_path / "model")
    sampling = Sampling(n=2, temperature=1.0, max_tokens=12, seed=1)
    engine = await start(tmp_path / "model", layout)
    trainer = Trainer(engine, "gloo", layout.workers)
    try:
        sampled = await generate(engine, given, sampling)
        for prompt, answer in zip(given, sampled, strict=True):
            for sample in answer.samples:
                assert sample.tokens[: sample.prompt_length].tolist() == prompt.tokens and list(sample.images) == list(prompt.images)
        assert_sees(family, tmp_path / "model", tmp_path / "model", sampled)
        if has_experts(family):
            experts = [(one.routed_experts, len(one.tokens)) for answer in sampled for one in answer.samples]
            assert all(chosen is not None and len(chosen) == length - 1 for chosen, length in experts)
        assert bits(await generate(engine, given, sampling)) == bits(sampled), "pictures that the engine has seen before"
        digest = await trainer.update(stored(tmp_path / "other"))
        assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == []
        again = await generate(engine, given, sampling)
        assert_sees(family, tmp_path / "other", tmp_path / "model", again)
        for keep_weights in (True, False):
            await engine.sleep(TIMEOUT_S, keep_weights=keep_weights)
            await engine.wake("weights", TIMEOUT_S)
            if not keep_weights:
                await trainer.update(stored(tmp_path / "other"))
            await engine.wake("kv_cache", TIMEOUT_S)
            assert bits(await generate(engine, given, sampling)) == bits(again)
    finally:
        trainer.close()
        await engine.close()


@pytest.mark.parametrize(
    ("family", "layout"),
    rows(
        [
            *((family, layout) for family in ("qwen3_vl_moe", "qwen3_vl") for layout in (ONE, TWO)),
            *(("qwen3_vl_moe", EP2), ("qwen3_5_moe_vl", ONE), ("qwen3_5_moe_vl", EP2), ("qwen3_5_vl", TWO)),
        ],
        [("qwen3_vl_moe", ONE)],
    ),
)
def test_an_engine_sees_what_transformers_sees_before_and_after_an_update(host: Host, tmp_path: Path, family: str, layout: Layout) -> None:
    host.run(_follows, tmp_path, family, layout)


def square(path: Path, seed: int) -> Image:
    """A picture of 64 tokens."""
    file, pixels = io.BytesIO(), np.random.default_rng(seed).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Pillow.fromarray(pixels).save(file, "PNG")
    return image_of(ImageProcessor(path), file.getvalue(), path.parent / "pictures")


def of_three(id_: int, images: Sequence[Image]) -> TokenPrompt:
    """A prompt of several blocks of the prefix cache, nearly all of them tokens of its pictures."""
    tokens, placed = [20], list[PlacedImage]()
    for image in images:
        placed.append(PlacedImage(len(tokens) + 1, image))
        tokens += [START, *[PAD] * image.tokens, END]
    return TokenPrompt(id_, [*tokens, 30, 31], images=placed)


async def _remembers(tmp_path: Path) -> None:
    path = tmp_path / "model"
    build(path, **SIZES, seed=1, family="qwen3_vl_moe", initializer_range=0.12)
    one, two, three, four = (square(path, seed) for seed in range(4))
    engine = await start(path, max_num_seqs=1)  # one after the other, so that what has been computed can be used again
    try:
        given = [of_three(0, (one, two, three)), of_three(1, (one, four, three)), of_three(2, (four, two, three))]
        sampled = await generate(engine, given, Sampling(n=2, temperature=1.0, max_tokens=8, seed=1))
        assert gap(transformers_model(path).eval(), path, sampled) < 1e-5
        cache = engine._llm.renderer.mm_processor_cache
        assert [cache.is_cached_item(key(image)) for image in (one, two, three, four)] == [True] * 4
        wrong = TokenPrompt(3, given[0].tokens[:-20], images=given[0].images)
        with pytest.raises(ValueError, match=r"image 2 has 64 tokens from token 134 on, and the prompt has 47 there$"):
            await generate(engine, [wrong], Sampling(n=1, temperature=1.0, max_tokens=8, seed=1))
        gone = replace(square(path, 5), source=ImageSource(str(tmp_path / "gone")))
        with pytest.raises(ImageGone, match=r"^image [0-9a-f]{12}: .*gone cannot be read: no such file"):
            await generate(engine, [of_three(4, [gone])], Sampling(n=1, temperature=1.0, max_tokens=8, seed=1))
        again = await generate(engine, given, Sampling(n=2, temperature=1.0, max_tokens=8, seed=1))
        assert bits(again) == bits(sampled), "it goes on after a refusal"
    finally:
        await engine.close()


def test_blocks_of_the_prefix_cache_are_of_the_pictures_that_they_hold(host: Host, tmp_path: Path) -> None:
    """Prompts of the same tokens, of which one picture differs: the first, or one in the middle."""
    host.run(_remembers, tmp_path)


async def _bounded(tmp_path: Path) -> None:
    path = tmp_path / "model"
    build(path, **SIZES, seed=1, family="qwen3_vl_moe", initializer_range=0.12)
    patches_mb = ImageProcessor(path).pixels(square(path, 0)).nbytes / 2**20
    engine = await start(path, engine={"type": "vllm", "args": {"mm_processor_cache_gb": 3.5 * patches_mb / 1024}})
    try:
        given = [of_three(number, [square(path, 3 * number + index) for index in range(3)]) for number in range(4)]
        sampling = Sampling(n=2, temperature=1.0, max_tokens=4, seed=1)
        sampled = await generate(engine, given, sampling)
        cache = engine._llm.renderer.mm_processor_cache
        assert sum(cache.is_cached_item(key(placed.image)) for prompt in given for placed in prompt.images) == 3
        assert bits(await generate(engine, given, sampling)) == bits(sampled), "what it no longer has is sent again"
    finally:
        await engine.close()


def test_an_engine_keeps_as_many_pictures_as_it_has_room_for(host: Host, tmp_path: Path) -> None:
    host.run(_bounded, tmp_path)


async def _in_flight(tmp_path: Path) -> None:
    """Responses to pictures, some of which are under way when the weights of tower and language model change."""
    for name, seed in (("model", 1), ("other", 2)):
        build(tmp_path / name, **SIZES, seed=seed, family="qwen3_vl_moe", initializer_range=0.12)
    path = tmp_path / "model"
    engine = Corruptible("engine 0")
    sizes: dict[str, Any] = {"max_prompt_tokens": 256, "max_response_tokens": 96, "max_num_seqs": 4, "kv_cache_mb": 64}
    settings = TrainRolloutSettings(mode="free", max_lag=1, timeout_s=TIMEOUT_S, **sizes)
    await engine.start(Setup(path, "float32", settings, 1, gpu=False, report_experts=True))
    trainer, responder = Trainer(engine, "shm"), Responder(engine, TIMEOUT_S)
    given = prompts(path)
    requests = [Request(n, given[n % 4].tokens, 96, 1.0, 1000 + n, images=given[n % 4].images) for n in range(12)]
    try:
        sampling = asyncio.create_task(responder.all(requests, TIMEOUT_S))
        counts = list[int]()
        while sum(counts) < sum(len(prompt.tokens) for prompt in given) + 40:
            counts = [count for core in await engine._on_cores("megarl_counts") for count in core.values()]
        await trainer.update(stored(tmp_path / "other"))
        samples, processor = await sampling, ImageProcessor(path)
        models = [transformers_model(tmp_path / name).eval() for name in ("model", "other")]
        mixed = 0
        for sample in samples:
            ends = [*(span.start for span in sample.weight_versions[1:]), sample.response_length]
            for span, end in zip(sample.weight_versions, ends, strict=True):
                gaps = torch.from_numpy(sample.rollout_logp) - logp(models[span.version], processor, sample)
                assert end == span.start or float(gaps[span.start : end].abs().max()) < 1e-5
            mixed += len(sample.images) > 0 and len(sample.weight_versions) == 2 and sample.weight_versions[1].start > 0
        assert mixed >= 1, "a response to pictures that was under way"
    finally:
        trainer.close()
        await engine.close()


@pytest.mark.long
def test_responses_to_pictures_go_on_with_new_weights(host: Host, tmp_path: Path) -> None:
    host.run(_in_flight, tmp_path)
