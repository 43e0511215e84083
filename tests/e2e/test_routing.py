"""Routing replay in the real loop: routes of the real engine, on the ranks that need them, in every pass."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.driver.dispatch import Dispatcher, Wanted
from megarl.driver.model_groups import ModelGroups
from megarl.models.description import ModelDescription
from megarl.models.sizes import MIXTURE
from tests.e2e.job import Job
from tests.e2e.lab import Lab
from tests.rows import rows
from tools.bench_routing import jittered_sync
from tools.make_tiny_model import build

SHORT = ("train.steps=3", "algorithm={type: grpo}")
JITTERED = (*SHORT, "sync.logprob_gap=1.0", "routing.alarm=0.02", "routing.sample=1.0", "optimizer.lr=1.0e-4", "train.old_logp=forward")


REPLAYED = [
    *(
        (family, "r3")
        for family in ("qwen3_moe", "deepseek_v3", "deepseek_v32", "gpt_oss", "qwen3_next", "ernie4_5_moe", "granitemoe", "nemotron_h")
    ),
    *((family, "r2") for family in ("moonlight", "gpt_oss", "qwen3_next", "ernie4_5_moe", "granitemoe", "nemotron_h")),
]


@pytest.mark.parametrize(("family", "replay"), rows(REPLAYED, [("qwen3_moe", "r3")]))
def test_replay_sends_every_token_to_the_experts_of_the_first_pass(lab: Lab, long: bool, tmp_path: Path, family: str, replay: str) -> None:
    """The engine's (r3): of the policy, of the reference on ranks of its own with other stages, and of the critic its own experts."""
    model = tmp_path / "model"
    build(model, layers=4, hidden=128, experts=8, expert_hidden=64, seed=1, family=family)  # two stages of two pieces each
    more = (
        f"train.steps={1 + long}",
        "layout={ranks: 2, pp: 2, vpp: 2}",
        "algorithm={type: ppo, kl_coef: 0.05}",
        "critic={optimizer: {lr: 0.001}}",
        "placement.reference={ranks: 2, cp: 2}",
        "train.epochs=2",
        "model.recompute=full",
    )
    routing = {"r3": "routing={replay: r3, reference: true, critic: true}", "r2": "routing={replay: r2, sample: 1.0, critic: true}"}[replay]
    job = lab.run(Job(tmp_path, model, (*more, routing)))
    sizes = ModelDescription.read(model).sizes
    mixtures = [layer for layer in range(sizes.dense, 4) if not sizes.blocks or sizes.blocks[layer] == MIXTURE]
    for row in job.steps():
        assert row["routing/replay_hit_rate"] == 1.0
        assert row["routing/rollout_changed_frac"] == row["routing/rollout_changed_tokens"] == 0.0
        assert {name for name in row if name.startswith("routing_by_layer/rollout")} == {
            f"routing_by_layer/rollout_changed_{layer}" for layer in mixtures
        }
        assert row["training/logprob_gap_max"] <= 1e-4


def test_no_experts_are_requested_if_none_are_used(lab: Lab, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = list[Any]()
    monkeypatch.setattr(Dispatcher, "ask", spied(wanted))
    job = lab.run(Job(tmp_path, tiny_model, (*SHORT, "train.steps=1", "routing.sample=0.0")))
    assert set(wanted) == {None}
    assert not any(name.startswith("routing") for row in job.steps() for name in row)


def spied(wanted: list[Any]) -> Any:
    ask = Dispatcher.ask

    def spy(self: Dispatcher, one: Wanted) -> None:
        wanted.append(one.experts)
        ask(self, one)

    return spy


@pytest.mark.long
def test_replay_removes_the_effect_of_a_routing_jitter(
    lab: Lab, long: bool, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the alarm rings; with it the train/rollout KL is less than half, and the first update begins at a ratio of exactly 1."""
    monkeypatch.setattr(ModelGroups, "sync", jittered_sync)
    kl = {}
    for replay in ("off", "r2", "r3") if long else ("off", "r3"):
        job = lab.run(Job(tmp_path / replay, tiny_model, (*JITTERED, f"routing.replay={replay}", "train.mini_batches=1")))
        steps = job.steps()
        kl[replay] = sum(row["rollout_corr/k3_kl"] for row in steps) / len(steps)
        alarms = json.loads((tmp_path / replay / "job" / "summary.json").read_text())["alarms"]
        assert ("rollout_routing" in alarms) == (replay != "r3")
        assert all(row["routing/rollout_changed_frac"] > 0.02 for row in steps)
        if replay != "off":
            assert all(row["actor/ratio_max"] == row["actor/ratio_inverse_max"] == row["routing/replay_hit_rate"] == 1.0 for row in steps)
    assert kl["r3"] < 0.5 * kl["off"]
