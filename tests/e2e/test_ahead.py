"""Engines that are ahead of the ranks: how far is known, and a run is the same each time and wherever it was cut off."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.e2e.comparing import assert_same
from tests.e2e.job import Job
from tests.e2e.lab import Lab

AHEAD = (
    "rollout.mode=ahead",
    "algorithm.correction={type: tis}",
    "routing.replay=r3",
    "train.steps=4",
    "train.dynamic_sampling_rounds=2",
    "train.eval_every=2",
    "save.every=1",
    "save.keep_last=4",
)


def test_a_batch_ahead_is_one_update_old_and_goes_with_the_checkpoint(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    straight = lab.run(Job(tmp_path / "straight", tiny_model, AHEAD))
    rows = straight.steps()
    assert [(row["rollout/lag_mean"], row["rollout/lag_max"], row["rollout/lag_mixed"]) for row in rows] == [(0, 0, 0)] + [(1, 1, 0)] * 3
    assert all(row["routing/replay_hit_rate"] == 1.0 and row["actor/grad_norm"] > 0 for row in rows)
    assert rows[0]["training/logprob_gap_mean"] <= 1e-5 < rows[1]["training/logprob_gap_mean"], "old weights have sampled the second"
    assert all(0 <= row["perf/idle_ranks"] <= 1 and 0 <= row["perf/idle_engines"] <= 1 for row in straight.rows() if "actor/lr" in row)

    cut = tmp_path / "cut"
    shutil.copytree(straight.runs, cut)
    for step in (3, 4):
        shutil.rmtree(cut / "job" / "checkpoints" / f"step_{step:06d}")
    assert (cut / "job" / "checkpoints" / "step_000002" / "ahead.npz").is_file()
    (cut / "job" / "checkpoints" / "latest").unlink()
    # The second half on other ranks would round otherwise; on as many engines' slots as there are it may not.
    assert_same(lab.run(Job(cut, tiny_model, (*AHEAD, "rollout.max_num_seqs=2"))), straight, "model")
