"""A step is the same on any layout and wherever its models stand, and a run goes on on any other layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.verify import main as verify
from megarl.config import TrainConfig, load
from megarl.convert.main import main as convert
from megarl.models.hf import Checkpoint
from tests.e2e.comparing import assert_same, cut_after, numbers, weights
from tests.e2e.job import EVERYTHING, Job, assert_same_step
from tests.e2e.kill_at import done
from tests.e2e.lab import Lab, with_nan
from tests.e2e.value_models import biased_by_position
from tests.rows import rows
from tools.make_tiny_model import build

# Engine and trainer agree, so all of it weighs every token with nearly 1.
CORRECTION = "algorithm.correction={type: tis, normalise: true, reject: [{by: k3, over: mean, hi: 0.01}], denominator: kept}"


@pytest.mark.parametrize(
    "overrides",
    [("layout.ranks=2", "layout.pp=2", "sync.transport=gloo"), ("layout.ranks=2", "layout.cp=2", "algorithm.kl_coef=0.01", CORRECTION)],
    ids=["pp2", "cp2-reference-correction"],
)
def test_a_step_is_the_same_on_any_layout(lab: Lab, one_rank: Job, tmp_path: Path, tiny_model: Path, overrides: tuple[str, ...]) -> None:
    job = lab.run(Job(tmp_path, tiny_model, ("train.steps=2", *overrides)))
    assert_same_step(job, one_rank)
    if CORRECTION in overrides:
        assert job.steps()[0]["rollout_corr/weight_ess"] == pytest.approx(1) and job.steps()[0]["rollout_corr/weight_zeroed"] == 0


@pytest.mark.long
def test_a_step_is_the_same_where_each_stage_sends_to_the_engines_worker_on_its_device(
    one_rank: Job, tmp_path: Path, tiny_model: Path
) -> None:
    shared = ("layout.ranks=2", "layout.pp=2", "placement.engines=shared", "rollout.tp=2")
    job = Job(tmp_path, tiny_model, ("train.steps=2", *shared))
    assert_same_step(job.run(), one_rank)
    planned = load(job.runs / "job.yaml", [*shared], TrainConfig).senders
    assert [row["sync/senders"] for row in job.steps()] == [2, 2] == [planned, planned]


@pytest.mark.long
def test_engines_that_are_sent_changes_take_the_same_steps(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """In bfloat16, from two stages, and in a run that goes on from a checkpoint, too, whose first sync sends everything."""
    small = ("optimizer={lr: 1.0e-5, warmup_steps: 0}", "rollout.dtype=bfloat16", "train.steps=4", "save.every=2")
    common = ("layout.ranks=2", "layout.pp=2", "sync.transport=gloo", "algorithm.correction={type: tis}", *small)
    whole = lab.run(Job(tmp_path / "whole", tiny_model, common), own_engine=True)
    job = lab.run(Job(tmp_path / "changes", tiny_model, (*common, "sync.delta=3")), own_engine=True)
    without = [{name: value for name, value in row.items() if not name.startswith("sync/")} for row in numbers(job)]
    assert without == [{name: value for name, value in row.items() if not name.startswith("sync/")} for row in numbers(whole)]
    assert weights(job, "model") == weights(whole, "model")
    sizes, shares = [row["sync/mb"] for row in job.steps()], [row["sync/sent_frac"] for row in job.steps()]
    assert shares[2] == 1 and sizes[2] == whole.steps()[2]["sync/mb"], "the third step's sync sends everything"
    assert all(0 < shares[step] < 0.5 and sizes[step] < sizes[2] for step in (0, 1, 3))
    cut = cut_after(2, job, tmp_path / "cut")
    assert_same(lab.run(Job(cut, tiny_model, (*common, "sync.delta=3")), own_engine=True), job, "model")


def test_a_critic_learns_beside_the_policy_and_is_saved(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    critic = "critic={optimizer: {lr: 0.001}, pretrain_steps: 2}"
    layout = ("layout.ranks=2", "layout.tp=2", "layout.ep=2")
    job = lab.run(Job(tmp_path, tiny_model, ("train.steps=1", "algorithm.type=vapo", critic, *layout)))
    rows = [row for row in job.rows() if "critic/vf_loss" in row]
    assert ["actor/grad_norm" in row for row in rows] == [False, False, True], "the policy is frozen while the critic is pretrained"
    assert all(row["critic/grad_norm"] > 0 and "critic/explained_variance" in row for row in rows)
    assert all(row["critic/position_bias"] < 0.1 and "events/critic_position_bias" not in row for row in rows), "fresh is not biased"
    assert rows[0]["training/logprob_gap_max"] <= 1e-3 and rows[2]["training/logprob_gap_max"] <= 1e-3
    saved = load_file(tmp_path / "job" / "critic" / "model.safetensors")
    assert saved["score.weight"].shape == (1, 128) and "lm_head.weight" not in saved


def test_numbers_that_are_not_finite_end_a_run_by_name_and_what_is_saved_is_whole(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    ruined = Job(tmp_path / "rate", tiny_model, ("optimizer.lr=1e30", "train.mini_batches=1", "train.steps=9", "save.every=1"))
    with pytest.raises(
        FloatingPointError, match=r"grad_norm is (nan|inf)|gives a number that is not finite|^weights that are not finite: "
    ):
        lab.run(ruined)
    assert done(ruined) >= 1 and verify([str(ruined.runs / "job")]) == 0
    name = with_nan(tiny_model, broken := tmp_path / "model")
    with pytest.raises(FloatingPointError, match=rf"^weights that are not finite: {name}\s"):
        lab.run(Job(tmp_path / "weights", broken))
    lab.forget()


CRITIC = (
    "algorithm={type: ppo, kl_coef: 0.05}",
    "critic={optimizer: {lr: 0.001}, epochs: 2, pretrain_steps: 1}",
    "train.steps=1",
    "train.epochs=2",
)
APART = {
    "critic-apart-in-larger-micro-batches": ("placement.critic={ranks: 2, tp: 2, ep: 2}", "critic.micro_batch_tokens=1024"),
    "reference-apart-and-cp": ("placement.reference={ranks: 2, cp: 2}", "layout={ranks: 2, cp: 2}", "critic.micro_batch_tokens=1024"),
    "offload": ("placement.offload=true",),
    "engines-that-share": ("placement.engines=shared", "save.every=1"),
    "all-take-turns": ("placement.engines=shared", "placement.offload=true", "save.every=1"),
}
SUITE = {"critic-apart-in-larger-micro-batches", "all-take-turns"}


@pytest.fixture(scope="module")
def shared(lab: Lab, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[dict[str, Any]]:
    """Policy, critic and reference on one rank."""
    return lab.run(Job(tmp_path_factory.mktemp("shared"), tiny_model, CRITIC)).updates()


@pytest.mark.parametrize("places", rows(APART, SUITE))
def test_a_step_is_the_same_wherever_its_models_stand(
    lab: Lab, shared: list[dict[str, Any]], tmp_path: Path, tiny_model: Path, places: str
) -> None:
    overrides = APART[places]
    updates = lab.run(Job(tmp_path, tiny_model, (*CRITIC, *overrides))).updates()
    assert len(updates) == len(shared) == 2 and "actor/reference_kl" in shared[1]
    for mine, one in zip(updates, shared, strict=True):
        assert mine.keys() == one.keys()
        for name in ("critic/vf_loss", "critic/grad_norm", "critic/value", "critic/explained_variance", "actor/grad_norm", "actor/entropy"):
            if name in one:
                # Equal to the last bit without parallel sums; a router's near tie may turn with them.
                apart = any("ranks" in key for key in overrides)
                assert mine[name] == (pytest.approx(one[name], rel=5e-3, abs=1e-6) if apart else one[name]), name


@pytest.mark.long
def test_value_pretraining_is_the_same_where_engines_and_ranks_take_turns(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """The policy is frozen: no sync brings the engines' weights back after the held-out rollouts are measured."""
    settings = ("algorithm.type=vapo", "critic={optimizer: {lr: 0.001}, pretrain_steps: 2}", "train.eval_every=1")

    def measured(places: str) -> list[dict[str, float]]:
        job = lab.run(Job(tmp_path / places, tiny_model, (*settings, f"placement.engines={places}"), verb="value"))
        kept = ("critic/", "heldout/", "reward/", "rollout/", "response_length/")
        return [{name: row[name] for name in row if name.startswith(kept)} for row in job.rows()]

    apart, shared = measured("apart"), measured("shared")
    assert [{"heldout/explained_variance", "reward/mean"} & row.keys() for row in apart[1:]] == [
        {"heldout/explained_variance", "reward/mean"}
    ] * 2
    assert shared == apart


def test_a_critic_that_is_biased_by_position_is_named_in_the_metrics_on_the_screen_and_in_the_summary(
    lab: Lab, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its value fades along every response by more than the rewards differ; three steps of a small learning rate do not mend it."""
    broken = biased_by_position(tiny_model, tmp_path / "critic", marker="<|assistant|>", scale=100.0)
    critic = f"critic={{path: {broken}, optimizer: {{lr: 1.0e-6}}, pretrain_steps: 2}}"
    job = lab.run(Job(tmp_path, tiny_model, ("train.steps=1", "algorithm.type=vapo", critic)))
    rows = [row for row in job.rows() if "critic/position_bias" in row]
    assert [row.get("events/critic_position_bias") for row in rows] == [None, None, 1.0]
    assert all(row["critic_by_position/value_from_1"] > 1.2 * row["critic_by_position/value_from_8"] > 0 for row in rows)
    message = json.loads((tmp_path / "job" / "summary.json").read_text())["alarms"]["critic_position_bias"]
    assert "tokens 2 to 3: mean value" in message and f"warning: {message}" in capsys.readouterr().err


def test_a_run_goes_on_on_any_other_layout(lab: Lab, long: bool, tmp_path: Path, tiny_model: Path) -> None:
    """Step by step: tensor and expert parallel, two pipeline stages; with --long one rank, four expert-parallel ones, and everything on.

    What the engines sample is compared first: with other responses (a router's near tie that rounding turns) the numbers are others.
    """
    layouts = ["{ranks: 2, tp: 2, ep: 2}", "{ranks: 2, pp: 2}", *["{ranks: 1}", "{ranks: 4, ep: 4}"] * long]
    settings = EVERYTHING if long else (*CRITIC, "save.every=1")
    for number, layout in enumerate(layouts):
        job = lab.run(Job(tmp_path / "many", tiny_model, (*settings, f"layout={layout}", f"train.steps={number + 1}")))
        assert job.updates()[-1]["step"] == number + 2
    straight = lab.run(Job(tmp_path / "one", tiny_model, (*settings, f"train.steps={len(layouts)}")))
    for one, other in zip(job.updates(), straight.updates(), strict=True):
        same = {name: (one[name], other[name]) for name in ("reward/mean", "response_length/mean", "perf/tokens")}
        assert all(mine == theirs for mine, theirs in same.values()), (one["step"], same)
        for name in ("critic/vf_loss", "critic/grad_norm", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/reference_kl"):
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), (one["step"], name)


FAMILIES = {
    "qwen3": ("layout.ranks=2", "layout.tp=2", "save.every=2"),
    "glm4_moe": ("layout.ranks=2", "layout.tp=2", "layout.ep=2", "sync.transport=gloo", "model.mtp=keep", "save.every=2"),
    "deepseek_v3": (
        "layout.ranks=2",
        "layout.pp=2",
        "model.mtp=train",
        "model.mtp_loss_weight=0.2",
        "rollout.speculative=1",
        "save.every=2",
    ),
}
PREDICTOR = "model.layers.2."  # behind the last layer


def stored(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def add_predictor(model: Path) -> None:
    """Tensors of a layer of multi-token prediction, with names as in published checkpoints."""
    tensors = load_file(model / "model.safetensors")
    layer = {name.replace(".layers.1.", ".layers.2."): tensor.clone() for name, tensor in tensors.items() if ".layers.1." in name}
    norms = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), torch.ones(128))
    further = {"eh_proj.weight": 0.05 * torch.randn(128, 256), **{name: one.clone() for name, one in norms.items()}}
    save_file({**tensors, **layer, **{PREDICTOR + name: tensor for name, tensor in further.items()}}, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


@pytest.mark.parametrize("family", rows(FAMILIES, ["glm4_moe"]))
def test_other_families_train_and_sync(lab: Lab, tmp_path: Path, family: str) -> None:
    """Every sync is checked by fingerprints (sync.verify), and engine and trainer agree about every token after an update."""
    model = tmp_path / "model"
    build(model, layers=2, hidden=128, experts=8, expert_hidden=64, seed=1, family=family)
    if family != "qwen3":
        add_predictor(model)
    job = lab.run(Job(tmp_path, model, ("train.steps=2", *FAMILIES[family])))
    steps, out = job.steps(), tmp_path / "job" / "model"
    assert len(steps) == 2 and all(row["actor/grad_norm"] > 0 for row in steps)
    assert all(row["training/logprob_gap_mean"] <= 1e-5 and row["training/logprob_gap_max"] <= 1e-4 for row in steps)
    assert [row.get("routing/rollout_changed_frac") for row in steps] == ([None, None] if family == "qwen3" else [0, 0])
    before, after = load_file(model / "model.safetensors"), stored(out)
    assert after.keys() == before.keys()
    predictor, trained = {name for name in before if name.startswith(PREDICTOR)}, family == "deepseek_v3"
    assert [{"mtp/loss", "mtp/accuracy", "mtp/grad_norm", "rollout/draft_accepted"} <= row.keys() for row in steps] == [trained] * 2
    assert json.loads((out / "config.json").read_text()).get("num_nextn_predict_layers", 0) == (1 if predictor else 0)
    kept = {name for name in after if (before[name] == after[name]).all()}
    assert predictor <= kept or trained
    kept -= set() if trained else predictor
    assert convert(["megatron-to-hf", str(tmp_path / "job"), str(tmp_path / "converted")]) == 0
    converted = stored(tmp_path / "converted")
    assert converted.keys() == after.keys() and all(torch.equal(converted[name], tensor) for name, tensor in after.items())
    biases = {name for name in after if name.endswith("e_score_correction_bias")} - (set() if trained else predictor)
    assert biases <= kept and all(".mlp.experts." in name for name in kept - biases), "an expert that no token chose stays"
