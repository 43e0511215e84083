"""Engines that are ahead of the ranks: how far is known, and a run is the same each time and wherever it was cut off."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.comparing import assert_same, cut_after
from tests.e2e.job import Job
from tests.e2e.kill_at import PHASES, VICTIMS, Aim, Processes, done, engine_processes, titled
from tests.e2e.lab import Lab
from tests.e2e.test_environments import GAME, REWRITES, with_template
from tests.rows import rows

EACH = ("algorithm.correction={type: tis}", "routing.replay=r3", "train.steps=4", "train.eval_every=2", "save.every=1", "save.keep_last=4")
MODES = {
    "ahead": ("rollout.mode=ahead", "train.dynamic_sampling_rounds=2"),
    "budget": ("rollout.mode=budget", "rollout.budget_tokens=5"),
}


@pytest.mark.parametrize("mode", rows(MODES, ["budget"]))
def test_a_run_whose_engines_are_ahead_goes_on_as_if_nothing_had_been(mode: str, lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    straight = lab.run(Job(tmp_path / "straight", tiny_model, (*EACH, *MODES[mode])))
    rows = straight.steps()
    lags = [(row["rollout/lag_mean"], row["rollout/lag_max"], row["rollout/lag_mixed"]) for row in rows]
    if mode == "ahead":
        assert lags == [(0, 0, 0)] + [(1, 1, 0)] * 3
    else:
        assert lags[0] == (0, 0, 0) and all(1 <= mean <= most <= 12 / 5 + 1 for mean, most, _ in lags[1:])
        assert max(mixed for _, _, mixed in lags) > 0.5
    assert all(row["routing/replay_hit_rate"] == 1.0 and row["actor/grad_norm"] > 0 for row in rows)
    assert rows[0]["training/logprob_gap_mean"] <= 1e-5 < rows[1]["training/logprob_gap_mean"], "old weights have sampled the second"
    idle = [(row["perf/idle_ranks"], row["perf/idle_engines"]) for row in straight.rows() if "actor/lr" in row]
    assert all(0 <= share <= 1 for both in idle for share in both)

    cut = cut_after(2, straight, tmp_path / "cut")
    saves = cut / "job" / "checkpoints"
    assert (saves / "step_000002" / "ahead.npz").is_file() and (saves / "step_000002" / "ahead.rest.npz").is_file() == (mode == "budget")
    # Engines that are given one prompt after the other say the same.
    assert_same(lab.run(Job(cut, tiny_model, (*EACH, *MODES[mode], "rollout.max_num_seqs=2"))), straight, "model")


OVERLAP = ("sync.transport=gloo", "sync.overlap=true", "layout.ranks=2", "layout.pp=2")


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_free_engines_keep_the_bound_on_lag(lab: Lab, tmp_path: Path, tiny_model: Path, overlap: bool) -> None:
    """With experts replayed, of a response that two versions have written too; new weights come in a pause, or beside the engine's work."""
    free = (*EACH, "rollout.mode=free", "rollout.max_lag=2", "train.prompts_per_step=4", *(OVERLAP if overlap else ()))
    job = lab.run(Job(tmp_path, tiny_model, free), own_engine=True)
    rows = job.steps()
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and all(row["rollout/lag_max"] <= 2 for row in rows)
    assert [row["rollout/waiting"] for row in rows] == [8.0] * 4 and rows[-1]["rollout/lag_mean"] > 0
    assert all(row["routing/replay_hit_rate"] == 1.0 and row["actor/grad_norm"] > 0 for row in rows)
    timed = [row for row in job.rows() if "timing_s/sync_pause" in row]
    assert len(timed) >= 4 and all((row["timing_s/sync_pause"] < row["timing_s/sync_move"]) == overlap for row in timed)
    assert (job.saves / "step_000002" / "ahead.rest.npz").is_file()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ahead", "free"])
def test_episodes_whose_template_rewrites_turns_are_learned_from_older_weights(
    mode: str, lab: Lab, tmp_path: Path, tiny_model: Path
) -> None:
    """Each sampled token counts once, in its own context; and a run goes on with the episodes that its checkpoint has."""
    model, own = with_template(tiny_model, REWRITES, tmp_path / "model"), ("rollout.mode=free", "rollout.max_lag=2")
    chosen = (*GAME, *EACH, *(own if mode == "free" else ("rollout.mode=ahead",)))
    straight = lab.run(Job(tmp_path / "straight", model, chosen), own_engine=True)
    rows = straight.steps()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["environment/contexts/mean"] == row["environment/turns/mean"] > 1 and row["environment/unreadable"] == 0
        assert row["routing/replay_hit_rate"] == 1.0 and row["actor/grad_norm"] > 0 and row["reward/mean"] == row["environment/reward/mean"]
        assert row["response_length/max"] <= 18 and row["rollout/lag_max"] <= (1 if mode == "ahead" else 2)
    assert rows[0]["training/logprob_gap_mean"] <= 1e-5
    lags = [(row["rollout/lag_mean"], row["rollout/lag_mixed"]) for row in rows]
    assert lags == [(0, 0)] + [(1, 0)] * 3 if mode == "ahead" else lags[-1][0] > 0
    said = [sample["response"] for file in (straight.runs / "job" / "samples").glob("*.jsonl") for sample in map(json.loads, file.open())]
    assert said and max(len(re.findall(r"<\|user\|>(?:sun|moon|stars)", text)) for text in said) == 2, "what is read anew is shown once"

    cut = cut_after(2, straight, tmp_path / "cut")
    again = lab.run(Job(cut, model, chosen), own_engine=True)
    if mode == "ahead":
        assert_same(again, straight, "model")
    assert [row["environment/contexts/mean"] == row["environment/turns/mean"] for row in again.steps()] == [True] * 4


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_engines_are_ahead_and_that_is_killed_in_every_phase_is_the_run_that_was_not(
    mode: str, lab: Lab, tmp_path: Path, tiny_model: Path
) -> None:
    """In each phase a rank and an engine, after which it goes on by itself, and then the driver."""
    rolling = f"save.rolling={'local' if mode == 'budget' else 'off'}"
    overrides = (*EACH, *MODES[mode], "train.steps=40", "train.eval_every=10", "cluster.restarts=2", rolling)
    straight, job = lab.run(Job(tmp_path / "straight", tiny_model, overrides)), Job(tmp_path / "killed", tiny_model, overrides)
    random, met = np.random.default_rng(16), list[str]()
    try:
        for phase in PHASES:
            job.start().wait_for("actors", lambda: "sync ..." in job.text())
            for number, victim in enumerate(VICTIMS[::-1]):
                job.wait_for("an engine and a rank", lambda: bool(len(engine_processes(job)) == 1 and titled(job, "ray::ModelWorker")))
                met.append(Aim(phase, victim, done(job) + 2).hit(job, Processes.of(job), job.wait_for, random))
                if victim != "driver":
                    job.wait_for("its recovery", lambda: job.text().count(": resumed after step ") > number)  # noqa: B023
            assert job.finish() == -9 and job.gone(), met
        job.run()
    finally:
        job.kill()
    print(*met, sep="\n")
    assert all(phase in moment for phase, moment in zip(np.repeat(PHASES, len(VICTIMS)), met, strict=True))
    assert_same(job, straight, "model")


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_lost_free_engines_are_replaced(replicas: int, tmp_path: Path, tiny_model: Path) -> None:
    """The last one, or one of two; at any moment. Nothing is older than before, and no prompt is lost."""
    free = ("rollout.mode=free", "rollout.max_lag=2", "train.prompts_per_step=4", f"rollout.replicas={replicas}")
    job, random = Job(tmp_path, tiny_model, (*EACH, *free, "train.steps=12", "save.every=0")).start(), np.random.default_rng(replicas)
    try:
        for number in range(3):
            job.wait_for(f"step {2 + 3 * number}", lambda: done(job) >= 2 + 3 * number, pause_s=0.02)  # noqa: B023
            time.sleep(random.uniform(0, 0.5))
            os.kill(int(random.choice([core for _, core in engine_processes(job)])), signal.SIGKILL)
            job.wait_for("its recovery", lambda: job.text().count(": resumed after step ") > number)  # noqa: B023
        assert job.finish() == 0 and job.gone(), job.text()[-3000:]
    finally:
        job.kill()
    rows = job.updates()
    assert [row["step"] for row in rows] == list(range(1, 13)) and all(row["rollout/lag_max"] <= 2 for row in rows)
    assert all(row["routing/replay_hit_rate"] == 1.0 and row["rollout/waiting"] == 8.0 for row in rows)
    assert sum(row.get("events/restart/engine", 0.0) for row in job.rows()) == 3.0
