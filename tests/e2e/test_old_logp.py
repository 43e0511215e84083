"""Old log-probs without a forward pass of their own: where one update follows, and from the engine (bypass mode)."""

from pathlib import Path

import pytest

from megarl.config import TrainConfig, load
from tests.e2e.job import Job
from tests.e2e.lab import Lab
from tests.rows import rows

ONE_UPDATE = ("train.steps=2", "algorithm={type: dapo}", "train.mini_batches=1")
OWN_PASS = ("routing/policy_", "routing_by_layer/policy_")  # that pass is compared with the update's


def test_skipping_the_pass_for_old_log_probs_changes_no_bit(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """Neither of the weights, and so of what is sampled from them in the steps that follow, nor of what the update says."""
    jobs = [
        lab.run(Job(tmp_path / kind, tiny_model, (*ONE_UPDATE, "routing.sample=1.0", f"train.old_logp={kind}")))
        for kind in ("forward", "auto")
    ]
    weights = [(job.runs / "job" / "model" / "model.safetensors").read_bytes() for job in jobs]
    assert weights[0] == weights[1]
    forward, auto = (job.steps() for job in jobs)
    assert len(forward) == len(auto) == 2
    for with_pass, without in zip(forward, auto, strict=True):
        own = {name for name in with_pass if name.startswith(OWN_PASS)}
        assert own and with_pass.keys() - without.keys() == own
        for name, value in without.items():  # the gap's sums are added up in another order
            gap = name.startswith(("rollout_corr/", "training/"))
            assert with_pass[name] == (pytest.approx(value, rel=1e-12, abs=1e-15) if gap else value), name
        assert without["actor/ratio_max"] == 1.0 and without["training/logprob_gap_mean"] > 0


@pytest.mark.parametrize("kind", rows(["forward", "auto", "rollout"], ["rollout"]))
def test_engines_with_another_model_end_the_run_at_its_first_step(lab: Lab, tmp_path: Path, tiny_model: Path, kind: str) -> None:
    job = Job(tmp_path, tiny_model, (*ONE_UPDATE, f"train.old_logp={kind}", "sync.logprob_gap=1e-12", "save.every=1"))
    with pytest.raises(RuntimeError, match=r"^step 1: mean \|log-prob of engine - of trainer\| is .*, more than sync\.logprob_gap=1e-12$"):
        lab.run(job)
    assert not job.steps() and not list((job.runs / "job").rglob("manifest.json")), "nothing that a run could resume from"


@pytest.mark.parametrize("layout", rows(["{ranks: 1}", "{ranks: 2, cp: 2}"], ["{ranks: 2, cp: 2}"]))
def test_the_engines_log_probs_can_serve_as_old_ones(lab: Lab, tmp_path: Path, tiny_model: Path, layout: str) -> None:
    """The ratio of the update is then the gap between engine and trainer."""
    for row in lab.run(Job(tmp_path, tiny_model, (*ONE_UPDATE, "train.old_logp=rollout", f"layout={layout}"))).steps():
        gap = row["training/logprob_gap_mean"]
        assert row["actor/ratio_max"] > 1.0 and 0 < gap < 1e-5
        assert row["actor/ppo_kl"] == pytest.approx(row["rollout_corr/kl"], abs=1e-3 * gap)
        assert row["rollout_corr/log_ppl_abs_diff"] > 0


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        (("train.mini_batches=1",), "update"),
        (("train.mini_batches=2",), "forward"),
        (("train.mini_batches=1", "train.epochs=2"), "forward"),
        (("train.mini_batches=1", "train.old_logp=forward"), "forward"),
        (("train.mini_batches=1", "algorithm.kl_coef=0.1"), "forward"),
        (("train.mini_batches=1", "algorithm.correction={type: tis}"), "forward"),
        (("train.mini_batches=1", "routing.replay=r2"), "forward"),
        (("train.mini_batches=1", "routing.replay=r3"), "update"),
        (("train.mini_batches=2", "train.old_logp=rollout"), "rollout"),
    ],
)
def test_the_pass_for_old_log_probs_is_skipped_if_nothing_reads_it(tmp_path: Path, overrides: tuple[str, ...], source: str) -> None:
    assert load(Job(tmp_path, tmp_path).write(), list(overrides), TrainConfig).old_logp == source
