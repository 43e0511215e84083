"""The times of a plan: speeds that others publish, and what must hold whatever the assumptions are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main
from megarl.config import Layout, TrainConfig, load
from megarl.plan.devices import DEVICES, EXCHANGE_LATENCY, GB, HOST_BANDWIDTH, NETWORK_SHARE
from megarl.plan.facts import Facts, facts
from megarl.plan.forward import _wait
from megarl.plan.search import search
from megarl.plan.times import StepTimes
from megarl.plan.whole import build, models_of
from tests.published_models import MODELS, description_of
from tests.unit.plan.planning import GSPO
from tools.calibrate_plan import SPEEDS, decoding_seconds, training_rate

H100, PUBLISHED = DEVICES["H100"], yaml.safe_load(SPEEDS.read_text())
QWEN, DEEPSEEK = (facts(description_of(MODELS[name])) for name in ("Qwen3-30B-A3B", "DeepSeek-V3"))
WITHIN = 1.5  # times the published speed, or as much less


@pytest.mark.parametrize("speed", PUBLISHED["decoding"], ids=lambda speed: f"{speed['model']}-{speed['gpus']}-{speed['running']}")
def test_a_decoding_step_takes_as_long_as_published(speed: dict[str, Any]) -> None:
    assert 1 / WITHIN < decoding_seconds(speed) * 1000 / speed["ms"] < WITHIN


@pytest.mark.parametrize("speed", PUBLISHED["training"], ids=lambda speed: f"{speed['model']}-{speed['layout']['ranks']}")
def test_training_is_as_fast_as_published(speed: dict[str, Any]) -> None:
    assert 1 / WITHIN < training_rate(speed) / speed["rate"] < WITHIN


FLEX = {"moe_token_dispatcher_type": "flex"}


def wait(its: Facts, layout: Layout, tokens: float = 65536, length: float = 4096, *, flex: bool = False) -> float:
    return _wait(its, layout, FLEX if flex else {}, H100, tokens, length, experts=True)


def test_deepep_sends_a_token_once_to_each_node() -> None:
    """All-to-all sends it as often as it has experts: as much if these are on as many nodes, and in a node there is no difference."""
    near, far = Layout(ranks=64, ep=8), Layout(ranks=64, ep=64)
    assert wait(QWEN, near, flex=True) == wait(QWEN, near)
    one = replace(QWEN, topk=1)
    assert wait(one, far, flex=True) == pytest.approx(wait(one, far))
    copy = 2 * 65536 * QWEN.n.hidden * 2 / (H100.network * NETWORK_SHARE)  # there and back, of each token
    sent = copy * 7 * (1 - (7 / 8) ** 8)
    assert wait(QWEN, far) - wait(QWEN, far, flex=True) == pytest.approx(copy * 7 - sent)
    anywhere = replace(DEEPSEEK, groups=1, chosen=1)
    assert wait(DEEPSEEK, far, flex=True) < wait(anywhere, far, flex=True), "four groups are on four of eight nodes"
    assert wait(DEEPSEEK, Layout(ranks=64, ep=32), flex=True) == wait(anywhere, Layout(ranks=64, ep=32), flex=True), (
        "there are but four nodes"
    )


def test_keys_and_values_travel_beside_the_attention_to_others() -> None:
    cut, whole = Layout(ranks=8, cp=8), Layout(ranks=8)
    assert wait(QWEN, cut, 8 * 16384, 100_000) == pytest.approx(wait(QWEN, whole, 16384) + 7 * EXCHANGE_LATENCY), "hidden"
    assert wait(QWEN, cut, 8 * 16384, 100) > wait(QWEN, whole, 16384) + 8 * EXCHANGE_LATENCY, "short sequences attend too briefly"


@pytest.fixture
def times(published: Path) -> Any:
    def planned(*changes: str, **options: Any) -> StepTimes:
        config = load(GSPO, [f"model.path={published / 'Qwen3-30B-A3B'}", "algorithm.correction={type: tis}", *changes], TrainConfig)
        found = build(config, models_of(config), H100, 80, **options).times
        assert found is not None
        return found

    return planned


def test_engines_that_never_wait_have_no_tail(times: Any) -> None:
    free = ["rollout.mode=free", "rollout.max_lag=1"]
    assert times(*free).generate < times("rollout.mode=ahead").generate
    few = "rollout.max_num_seqs=64"  # as many as run in both modes
    alike = [times(few, *mode, mean_length=1.0).generate for mode in (free, ["rollout.mode=ahead"])]
    assert alike[0] == pytest.approx(alike[1]), "responses of one length end together"
    assert times("rollout.mode=free", "rollout.max_lag=4").generate <= times(*free).generate


def test_ranks_leave_the_gpus_that_they_share_and_return(times: Any, published: Path) -> None:
    assert times().park == 0
    changes = [f"model.path={published / 'Qwen3-30B-A3B'}", "placement.engines=shared", "sync.transport=cuda_ipc"]
    config = load(GSPO, changes, TrainConfig)
    plan = build(config, models_of(config), H100, 80)
    assert plan.times is not None
    waiting = max(stage.waiting for stage in plan.groups[0].stages)
    assert plan.times.park == pytest.approx(2 * waiting / HOST_BANDWIDTH) and waiting > 20e9


def test_a_step_lasts_as_long_as_the_rank_with_the_longest_sequence(times: Any) -> None:
    """With a sequence on each data-parallel rank, the longest decides; with many the mean does."""
    alone = "train.prompts_per_step=2", "rollout.samples_per_prompt=4", "train.mini_batches=1", "layout={ranks: 16, tp: 2, ep: 8, etp: 1}"
    one, mean = times(*alone, mean_length=1.0), times(*alone, mean_length=0.5)
    assert 0.9 < mean.update / one.update <= 1
    many = times(mean_length=0.5).update / times(mean_length=1.0).update
    assert many < 0.7


def test_engines_on_gpus_of_another_kind(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their memory and bandwidth are those of the other kind, and the ranks' side is as it was; layouts keep the number of ranks."""
    path = f"model.path={published / 'Qwen3-30B-A3B'}"
    config = load(GSPO, [path], TrainConfig)
    models, mixed = models_of(config), replace(H100, engines=DEVICES["H20"])
    alone, both = build(config, models, H100, 80), build(config, models, mixed, 80)
    assert alone.times is not None and both.times is not None and alone.engine is not None and both.engine is not None
    assert (both.times.score, both.times.update) == (alone.times.score, alone.times.update) and both.groups == alone.groups
    assert both.engine.cache - alone.engine.cache == pytest.approx(16 * GB * config.rollout.gpu_memory_fraction)
    assert both.times.generate < alone.times.generate, "4.0 TB/s instead of 3.35"
    small = build(config, models, replace(H100, engines=DEVICES["L40S"]), 80)
    assert small.times is not None and small.times.generate > alone.times.generate and small.times.sync == 2 * both.times.sync
    layouts = search(config, models, mixed, 80, 32)
    assert layouts and all(one.layout.ranks == 16 and "placement.engines=shared" not in one.changes for one in layouts)
    assert main(["plan", str(GSPO), path, "--engine-device", "H20"]) == 0
    assert "16 for ranks, 16 for engines: H20 of 96 GB" in (out := capsys.readouterr().out) and "of whatever kind" in out
    assert main(["plan", str(GSPO), path, "--engine-device", "H20", "placement.engines=shared", "sync.transport=cuda_ipc"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("--engine-device H20: with placement.engines=shared engines have no GPUs of their own")
