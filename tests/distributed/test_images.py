"""A model that sees images is transformers' on every layout, and so is its gradient, which does not depend on the layout.

Axes: T tokens fed, V vocabulary.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models.qwen2_vl.image_processing_pil_qwen2_vl  # noqa: F401  # which every rank would import
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megarl.batch import Batch, Sample, pack
from megarl.config import ConfigError, Layout, ModelSettings, OptimizerSettings
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, check_layout
from megarl.models.image_processor import ImageProcessor
from megarl.models.vision import VisionSizes
from megarl.parallel import schedule
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy
from megarl.parallel.optimizer import make_trainable
from megarl.parallel.vision import Tower
from megarl.parallel.weights import load_hf
from megarl.plan.tower import tower_bytes, tower_flops
from tests.distributed.exported import tensors_of
from tests.distributed.plan_work import Saved
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import BY_GRADIENTS, assert_same_gradients, moved
from tests.float64 import in_float64
from tests.image_samples import PAD, image_of, inverted, samples
from tests.rank_pool import Pool
from tests.rows import rows
from tools.check_logits import Part, joined, transformers_model

BOUND = 1e-5  # of a logit
WIDE_BOUND = 1e-9  # in float64
LAYOUTS = {
    "tp2_ep2": Layout(ranks=2, tp=2, ep=2),
    "pp2": Layout(ranks=2, pp=2),
    "cp2": Layout(ranks=2, cp=2),
    "cp2_tp2": Layout(ranks=4, cp=2, tp=2),
    "pp2_ep2_cp2": Layout(ranks=4, pp=2, ep=2, cp=2),
    "dp2_ep2": Layout(ranks=2, ep=2),
}


def built(grid: Grid, path: Path, recompute: str = "none", tower: bool = False) -> tuple[list[Any], ModelDescription]:
    """This rank's chunks, in torch's default dtype."""
    model = ModelDescription.read(path)
    settings = ModelSettings(path=path, dtype="float32", recompute=recompute)  # type: ignore[arg-type]
    config = transformer_config(model, settings, grid.layout, choose())
    config.params_dtype = config.pipeline_dtype = torch.get_default_dtype()
    chunks = build_chunks(config, model, choose(), grad=True, images=ImageProcessor(path), tower=tower)
    load_hf(chunks, model, grid)
    return chunks, model


def logits(grid: Grid, path: Path, micro_batches: list[Batch]) -> list[Part | None]:
    """This rank's part of the logits of each micro-batch."""
    chunks, _ = built(grid, path)

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, Part]:
        return torch.zeros(()), Part(grid.tp_rank, batch.extra_T["entry"].numpy(), logits_RV[row_T].numpy())

    numbered = [batch.with_extra(entry=torch.arange(len(batch))) for batch in micro_batches]
    found = schedule.run(chunks, numbered, loss_fn, grid, forward_only=True)
    return found if found and not grid.dp_rank else [None] * len(micro_batches)


def wide_logits(grid: Grid, path: Path, micro_batches: list[Batch]) -> list[Part | None]:
    with in_float64():
        return logits(grid, path, micro_batches)


def theirs(path: Path, several: list[Sample]) -> Tensor:
    """transformers' logits [T, V] of the samples, one after the other, in torch's default dtype."""
    dtype, found = torch.get_default_dtype(), list[Tensor]()
    loops = {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # torch's grouped products are not for float64
    model = transformers_model(path, str(dtype).removeprefix("torch."), **loops).eval()
    for sample in several:
        tokens, given = as_inputs(path, sample)
        with torch.no_grad():
            found.append(model(tokens, **given).logits[0])
    return torch.cat(found)


def as_inputs(path: Path, sample: Sample) -> tuple[Tensor, dict[str, Tensor]]:
    """The tokens of a sample that are fed [1, T], and its images as transformers' class takes them."""
    tokens, processor, given = torch.from_numpy(sample.tokens[None, :-1].astype(np.int64)), ImageProcessor(path), dict[str, Tensor]()
    if sample.images:
        given["pixel_values"] = torch.cat([processor.pixels(one.image) for one in sample.images])
        given["image_grid_thw"] = torch.tensor([one.image.grid for one in sample.images])
        given["mm_token_type_ids"] = (tokens == PAD).int()
    return tokens, given


def drawn(path: Path) -> list[list[Sample]]:
    """Micro-batches with different numbers of images, one of them without any."""
    return [samples(path), samples(path, (0, 0), seed=4), samples(path, (1,), seed=5)]


def ours(pool: Pool, path: Path, layout: Layout, *, wide: bool = False) -> list[Tensor]:
    """Megatron's logits [T, V] of each micro-batch, in float32 or in float64."""
    micro_batches = [pack(own) for own in drawn(path)]
    check_layout(check_checkpoint(path), layout)
    parts = pool.run(wide_logits if wide else logits, layout, path, micro_batches)
    return [joined([part[index] for part in parts], batch, 129) for index, batch in enumerate(micro_batches)]


def assert_logits(pool: Pool, path: Path, layout: Layout) -> None:
    for ours_TV, own in zip(ours(pool, path, layout), drawn(path), strict=True):
        theirs_TV = theirs(path, own)
        assert 0.3 < theirs_TV.std() < 5
        torch.testing.assert_close(ours_TV, theirs_TV, rtol=0, atol=BOUND)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_vl"])
def test_logits_of_images_equal_those_of_transformers(pool: Pool, make: Make, family: str) -> None:
    assert_logits(pool, make(family), Layout())


HYBRID = [
    *(("qwen3_5_moe_vl", name) for name in ("one", "tp2_ep2", "pp2", "cp2_tp2", "pp2_ep2_cp2")),
    *(("qwen3_5_vl", name) for name in ("one", "cp2_tp2")),
]
WIDE = [("qwen3_vl_moe", "one"), ("qwen3_vl", "one"), *HYBRID]
NARROW = [("qwen3_5_moe_vl", "one"), ("qwen3_5_moe_vl", "pp2_ep2_cp2"), ("qwen3_5_vl", "one")]


@pytest.mark.parametrize(("family", "name"), rows(WIDE, [("qwen3_5_moe_vl", "cp2_tp2")]))
def test_logits_of_images_in_float64_are_those_of_transformers(pool: Pool, make: Make, family: str, name: str) -> None:
    """In float32 each of the two is as far from them as it is (below)."""
    path = make(family)
    for ours_TV, own in zip(ours(pool, path, LAYOUTS.get(name, Layout()), wide=True), drawn(path), strict=True):
        with in_float64():
            theirs_TV = theirs(path, own)
        assert ours_TV.dtype == theirs_TV.dtype == torch.float64 and 0.3 < theirs_TV.std() < 5
        torch.testing.assert_close(ours_TV, theirs_TV, rtol=0, atol=WIDE_BOUND)


@pytest.mark.parametrize(("family", "name"), rows(NARROW, [("qwen3_5_vl", "one")]))
def test_logits_of_images_in_float32_are_as_near_to_those_in_float64_as_transformers(
    pool: Pool, make: Make, family: str, name: str
) -> None:
    """Within twice transformers' own largest difference: gated delta nets amplify rounding in either's order of operations."""
    path = make(family)
    for ours_TV, own in zip(ours(pool, path, LAYOUTS.get(name, Layout())), drawn(path), strict=True):
        theirs_TV = theirs(path, own)
        with in_float64():
            exact_TV = theirs(path, own)
        assert ours_TV.dtype == theirs_TV.dtype == torch.float32
        gap, their_gap = (float((one.double() - exact_TV).abs().max()) for one in (ours_TV, theirs_TV))
        assert gap <= 2 * their_gap + 1e-6


@pytest.mark.parametrize("name", rows(LAYOUTS, ["tp2_ep2", "pp2", "cp2_tp2"]))
def test_logits_of_images_equal_those_of_transformers_on_every_layout(pool: Pool, make: Make, name: str) -> None:
    assert_logits(pool, make("qwen3_vl_moe"), LAYOUTS[name])


def test_an_image_changes_what_follows_it_and_nothing_else(pool: Pool, make: Make) -> None:
    path = make("qwen3_vl_moe")
    one, two = samples(path, (2, 1))
    first, last = one.images
    other = replace(last, image=image_of(ImageProcessor(path), inverted(last.image.read()), path.parent / "pictures"))
    batch = pack([one, two])
    [[seen, altered]] = pool.run(logits, Layout(), path, [batch, pack([replace(one, images=[first, other]), two])])
    gap_T = (joined([seen], batch, 129) - joined([altered], batch, 129)).abs().amax(-1)
    assert (gap_T[(batch.seq_T == 1) | (batch.position_T < last.start)] < BOUND).all()  # rounding: experts get other tokens beside
    assert (gap_T[(batch.seq_T == 0) & (batch.position_T >= last.start)] > 1e-3).all()


def weights_of(several: list[Sample]) -> Tensor:
    """A weight in the loss for every token, so that every expert has a gradient."""
    count = sum(len(sample.tokens) - 1 for sample in several)
    return torch.from_numpy(np.random.default_rng(1).normal(size=count).astype(np.float32)) / count


def gradients(grid: Grid, path: Path, several: list[Sample], count: int, recompute: str, tower: bool) -> dict[str, Tensor]:
    """On rank 0, a thousand times the gradient of every weight by Hugging Face's name, through the real optimizer and export."""
    chunks, model = built(grid, path, recompute, tower)
    policy = make_trainable(chunks, OptimizerSettings(**BY_GRADIENTS), total_steps=10)  # type: ignore[arg-type]
    batch = pack(several)
    batch = batch.with_extra(weight=weights_of(several))

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, None]:
        logp_T, _ = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, grid.groups.tp, model.vocab)
        return (batch.extra_T["weight"] * logp_T).sum(), None

    before = tensors_of(policy.chunks, model, grid, torch.float32)
    policy.zero_grad()
    parts = [batch.take((batch.seq_T % count == part).nonzero().squeeze(1)) for part in range(count)]
    schedule.run(policy.chunks, parts[grid.dp_rank :: grid.dp_size], loss_fn, grid, forward_only=False)
    policy.step()
    return moved(before, tensors_of(policy.chunks, model, grid, torch.float32))


CASES = [
    *(("qwen3_vl_moe", name, recompute, tower) for name in LAYOUTS for recompute in ("none", "full") for tower in (False, True)),
    *(("qwen3_5_moe_vl", name, "full", True) for name in ("tp2_ep2", "dp2_ep2", "pp2_ep2_cp2")),
    ("qwen3_5_moe_vl", "cp2_tp2", "none", False),
    ("qwen3_5_vl", "cp2", "none", True),
]
SHORT = [("qwen3_vl_moe", "pp2_ep2_cp2", "full", True), ("qwen3_5_moe_vl", "pp2_ep2_cp2", "full", True)]


@pytest.mark.parametrize(("family", "name", "recompute", "tower"), rows(CASES, SHORT))
def test_gradients_are_independent_of_layout_and_recomputation(
    pool: Pool, make: Make, family: str, name: str, recompute: str, tower: bool
) -> None:
    """With the tower frozen or trained. One of the micro-batches has no image."""
    path, several = make(family), samples(make(family))
    one = pool.run(gradients, Layout(), path, several, 1, "none", tower)[0]
    many = pool.run(gradients, LAYOUTS[name], path, several, 4, recompute, tower)[0]
    frozen = {key for key in one if key.startswith("model.visual.") and not tower}
    assert bool(frozen) != tower and all(not one[key].any() and not many[key].any() for key in frozen)
    assert_same_gradients(*({key: value for key, value in own.items() if key not in frozen} for own in (many, one)))


@pytest.mark.parametrize("family", rows(["qwen3_vl_moe", "qwen3_5_moe_vl"], ["qwen3_vl_moe"]))
def test_gradients_of_the_tower_are_those_of_transformers(pool: Pool, make: Make, family: str) -> None:
    path, several = make(family), samples(make(family))
    ours, model, weights = pool.run(gradients, Layout(), path, several, 1, "full", True)[0], transformers_model(path), weights_of(several)
    first = 0
    for sample in several:
        inputs, given = as_inputs(path, sample)
        logp_T = (
            model(inputs, **given).logits[0].log_softmax(-1).gather(1, torch.from_numpy(sample.tokens[1:, None].astype(np.int64)))[:, 0]
        )
        (logp_T * weights[first : first + len(logp_T)]).sum().backward()
        first += len(logp_T)
    theirs = {name: 1e3 * parameter.grad for name, parameter in model.named_parameters() if name.startswith("model.visual.")}
    assert_same_gradients({name: ours[name] for name in theirs}, theirs)


def test_a_first_chunk_too_small_for_the_features_is_refused(make: Make) -> None:
    model = check_checkpoint(make("qwen3_vl_moe"))
    for layout in (Layout(ranks=4, pp=4), Layout(ranks=2, pp=2, vpp=2)):
        with pytest.raises(ConfigError, match=r"^layout\.pp=\d: the first chunk has 1 layers, and 2 take features of images"):
            check_layout(model, layout)


SIZES = VisionSizes(4, 128, 448, 4, 3, 16, 2, 2, 8, 96, (0, 2), (8, 4, 4), 7)
GRIDS = [(1, 12, 16), (1, 6, 4), (1, 20, 8)]


def tower_cost(grid: Grid) -> tuple[float, int]:
    """FLOPs of a forward pass of the tower over some images, and the bytes that it keeps for the backward, with the pixels."""
    torch.manual_seed(1)
    tower, pixels = Tower(SIZES, torch.float32), torch.randn(sum(math.prod(one) for one in GRIDS), SIZES.pixels)
    saved = Saved({parameter.untyped_storage().data_ptr() for parameter in tower.parameters()})
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():  # the counter sees no other attention
        tower(pixels, GRIDS)
    with saved_tensors_hooks(saved.pack, lambda kept: kept):
        features = tower(pixels, GRIDS)
    assert len(features) == 3
    return counter.get_total_flops(), saved.peak


def test_the_plan_knows_the_work_of_the_tower(pool: Pool) -> None:
    [(flops, kept)] = pool.run(tower_cost, Layout())
    tokens = [math.prod(one) // 4 for one in GRIDS]
    assert sum(tower_flops(SIZES, own) for own in tokens) == pytest.approx(flops, rel=0.02)
    assert tower_bytes(SIZES, sum(tokens), 4, trained=True) == pytest.approx(kept, rel=0.15)
    assert tower_bytes(SIZES, sum(tokens), 4, trained=False) < tower_bytes(SIZES, sum(tokens), 4, trained=True)
