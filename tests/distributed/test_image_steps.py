"""RL steps on responses with images: the same on any layout and in any micro-batches, with every model, and with replayed experts."""

from pathlib import Path
from typing import Any

import pytest

from megarl.batch import pack
from megarl.config import Layout, LoraSettings
from tests.distributed.image_steps import LARGE, SMALL, Case, episodes, learn
from tests.distributed.split_episodes import assert_same_updates, shown
from tests.distributed.tiny_families import Make
from tests.rank_pool import Pool
from tests.rows import rows

LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(ranks=2),
    "tp2_ep2": Layout(ranks=2, tp=2, ep=2),
    "pp2": Layout(ranks=2, pp=2),
    "cp2": Layout(ranks=2, cp=2),
    "pp2_ep2_cp2": Layout(ranks=4, pp=2, ep=2, cp=2),
}
GRPO = {"type": "grpo", "kl_coef": 0.1}
GSPO = {"type": "gspo", "clip_low": 0.5, "clip_high": 0.5}
PPO = {"type": "ppo"}
NUMBERS = ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl", "actor/kl_loss", "critic/grad_norm", "critic/loss")


@pytest.fixture(scope="module")
def path(make: Make) -> Path:
    return make("qwen3_vl_moe")


@pytest.fixture(scope="module")
def hybrid(make: Make) -> Path:
    """With gated delta nets."""
    return make("qwen3_5_moe_vl")


def assert_same(pool: Pool, path: Path, algorithm: dict[str, Any], layout: Layout, **more: Any) -> None:
    """A layout's step, in micro-batches of few samples, is that of one rank in one micro-batch."""
    [one] = pool.run(learn, Layout(), Case(path, algorithm, LARGE, **more))
    ranks = pool.run(learn, layout, Case(path, algorithm, SMALL, **more))
    assert_same_updates(one, ranks, NUMBERS)
    assert {n: score for seen in ranks for n, score in seen.scores.items()} == pytest.approx(one.scores, abs=2e-5)
    assert sorted(one.scores) == [0, 1, 2, 3]


@pytest.mark.parametrize("algorithm", rows([GRPO, GSPO, PPO], [PPO]), ids=lambda one: one["type"])
@pytest.mark.parametrize("name", rows(LAYOUTS, ["pp2_ep2_cp2"]))
def test_a_step_with_images_is_the_same_on_any_layout(pool: Pool, path: Path, name: str, algorithm: dict[str, Any]) -> None:
    assert_same(pool, path, algorithm, LAYOUTS[name])


@pytest.mark.long
@pytest.mark.parametrize(("name", "algorithm"), [("tp2_ep2", GRPO), ("cp2", GSPO), ("pp2_ep2_cp2", PPO)])
def test_a_step_of_a_hybrid_model_with_images_is_the_same_on_any_layout(
    pool: Pool, hybrid: Path, name: str, algorithm: dict[str, Any]
) -> None:
    assert_same(pool, hybrid, algorithm, LAYOUTS[name])


@pytest.mark.long
def test_adapters_of_a_hybrid_model_learn_from_images(pool: Pool, hybrid: Path) -> None:
    assert_same(pool, hybrid, GRPO, LAYOUTS["tp2_ep2"], lora=LoraSettings(rank=4, alpha=8, targets=["attention"]))


@pytest.mark.parametrize("name", rows(["tp2_ep2", "pp2_ep2_cp2"], ["tp2_ep2"]))
def test_adapters_learn_from_images_on_any_layout(pool: Pool, path: Path, name: str) -> None:
    assert_same(pool, path, GRPO, LAYOUTS[name], lora=LoraSettings(rank=4, alpha=8, targets=["attention"]))


REPLAYED = [(name, replay) for name in ("one", "tp2_ep2", "pp2", "pp2_ep2_cp2") for replay in ("r2", "r3")]


@pytest.mark.parametrize(("name", "replay"), rows(REPLAYED, [("pp2_ep2_cp2", "r3")]))
def test_experts_of_image_tokens_are_replayed(pool: Pool, path: Path, name: str, replay: Any) -> None:
    assert_replayed(pool, path, name, replay)


@pytest.mark.parametrize(("name", "replay"), rows([("tp2_ep2", "r2"), ("pp2_ep2_cp2", "r3")], [("pp2_ep2_cp2", "r3")]))
def test_experts_of_image_tokens_are_replayed_in_a_hybrid_model(pool: Pool, hybrid: Path, name: str, replay: Any) -> None:
    assert_replayed(pool, hybrid, name, replay)


def assert_replayed(pool: Pool, path: Path, name: str, replay: Any) -> None:
    """Every token's, images' included: the rate of hits counts them all, and the first ratio is 1."""
    ranks = pool.run(learn, LAYOUTS[name], Case(path, GRPO, replay=replay))
    first, second = shown(ranks)
    assert first["routing/replay_hit_rate"] == second["routing/replay_hit_rate"] == 1.0
    assert first["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    [one] = pool.run(learn, Layout(), Case(path, GRPO, LARGE, replay=replay))
    logp = {token: lp for seen in ranks for token, lp in seen.logp.items()}
    assert logp == pytest.approx(one.logp, abs=2e-5)


def test_images_are_seen_and_their_tokens_are_not_learned(pool: Pool, path: Path) -> None:
    seen, blind = (pool.run(learn, Layout(), Case(path, GRPO, LARGE, images=images))[0].logp for images in (True, False))
    assert seen.keys() == blind.keys()
    changed = {n for (n, position), lp in seen.items() if abs(lp - blind[n, position]) > 1e-3}
    assert changed == {0, 2, 3}, "all but the response without images"
    batch = pack(own := episodes(path))
    assert batch.images_N is not None and [len(images) for images in batch.images_N] == [2, 0, 1, 3]
    assert [len(sample.starts) for sample in own] == [0, 0, 0, 1]
