"""A run that is killed again and again, wherever it is, is the run that was not, and ends as a run ends from the command line."""

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.e2e.comparing import assert_same
from tests.e2e.job import EVERYTHING, RESTARTED, Job, listeners, read
from tests.e2e.kill_at import PHASES, VICTIMS, Aim, Phase, Processes, Victim

SEED = 20
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
MENDED: tuple[tuple[Phase, Victim], ...] = (("update", "rank"), ("rollout", "engine core"))  # the second with --long alone


def chosen() -> list[tuple[Phase, Victim]]:
    """Every phase through every victim, in random order."""
    pairs = list(product(PHASES, VICTIMS))
    return [pairs[n] for n in np.random.default_rng(SEED).permutation(len(pairs))]


def killed(job: Job, aim: Aim, random: np.random.Generator) -> str:
    """The command line is started and killed; the moment at which it was."""
    job.start().wait_for("actors", lambda: "sync ..." in job.text())
    met = aim.hit(job, Processes.of(job), job.wait_for, random)
    assert job.finish() == (-9 if aim.victim == "driver" else 1), job.text()[-4000:]
    assert job.gone(), met
    if aim.victim == "engine core":
        assert "EngineDead" in job.text() and "engine 0" in job.text()
    return met


def closed_to_the_network(job: Job) -> bytes:
    """The token of its session, which nobody else knows. The job listens to this machine alone, and yields to no stranger's process."""
    pids = job.pids()
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {os.getpriority(os.PRIO_PROCESS, 0)}
    addresses = listeners(pids)
    assert len(addresses) >= 5 and set(addresses) <= LOOPBACK
    entries = [entry for pid in pids for entry in read(f"/proc/{pid}/environ").split(b"\0")]
    [token] = {entry.partition(b"=")[2] for entry in entries if entry.startswith(b"RAY_AUTH_TOKEN=")}
    assert len(token) >= 32 and not any(token in read(f"/proc/{pid}/cmdline") for pid in pids)
    return token


def mended(job: Job, step: int, random: np.random.Generator, long: bool) -> list[str]:
    """The command line is started; a rank is killed in an update, an engine's core in a rollout some steps later, and the run goes on."""
    job.start().wait_for("actors", lambda: "sync ..." in job.text())
    token, moments = closed_to_the_network(job), []
    for number, (phase, victim) in enumerate(MENDED[: 1 + long]):
        moments.append(Aim(phase, victim, step + 2 * number).hit(job, Processes.of(job), job.wait_for, random))
        job.wait_for("its recovery", lambda: job.text().count(": resumed after step ") > number)  # noqa: B023
    assert job.finish() == 0, job.text()[-4000:]
    assert not any(token in path.read_bytes() for path in job.runs.rglob("*") if path.is_file())
    return moments


@pytest.fixture(scope="module")
def ends(long: bool, steps: int, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[tuple[Job, list[str]]]:
    """Runs that were killed at random moments, spread over their steps, and then came to their end; and these moments.

    With --long each phase is hit through each victim, over two runs. The last start, the suite's only one, is hit and goes on by itself;
    that engines which die are replaced is in the suite by `test_engines.py`.
    """
    pairs, runs = (chosen(), 2) if long else ([], 1)
    first, all_of_it = np.linspace(1, steps - 5, len(pairs) // runs).astype(int), (*EVERYTHING, f"train.steps={steps - 1}")
    places = [tmp_path_factory.mktemp("killed") for _ in range(runs)]

    def chain(number: int) -> tuple[Job, list[str]]:
        random, met = np.random.default_rng([SEED, number]), list[str]()
        for (phase, victim), step in zip(pairs[number::runs], first, strict=True):
            job, aim = Job(places[number], tiny_model, (*all_of_it, "cluster.restarts=0")), Aim(phase, victim, int(step))
            met.append(killed(job, aim, random))
        job = Job(places[number], tiny_model, (*all_of_it, "log.tensorboard=true"))
        return job, [*met, *mended(job, steps - 3, random, long)]

    with ThreadPoolExecutor(runs) as pool:
        found = list(pool.map(chain, range(runs)))
    hits = [moment for _, met in found for moment in met]
    assert len(hits) == len(pairs) + runs * (1 + long)
    assert all(any(phase in moment for moment in hits) for phase in (PHASES if long else ("update",)))
    return found


def test_a_run_killed_at_random_moments_is_the_run_that_was_not(ends: Sequence[tuple[Job, list[str]]], straight: Job) -> None:
    for job, met in ends:
        print(f"seed {SEED}, killed:", *met, sep="\n  ")
        try:
            assert_same(job, straight, "model", "critic")
        except AssertionError as error:
            raise AssertionError("\n".join([f"seed {SEED}, killed:", *met])) from error


def test_a_run_leaves_its_summary_and_a_model_and_no_process(ends: Sequence[tuple[Job, list[str]]], steps: int, long: bool) -> None:
    kinds = ["rank", "engine"][: 1 + long]
    for job, _ in ends:
        directory = job.runs / "job"
        summary = json.loads((directory / "summary.json").read_text())
        assert [one["kind"] for one in summary["restarts"]] == kinds
        told = [row for row in job.rows() if RESTARTED in row]
        assert [(row.get(f"{RESTARTED}/rank"), row.get(f"{RESTARTED}/engine")) for row in told] == [(1.0, None), (None, 1.0)][: len(kinds)]
        assert all(row[f"{RESTARTED}/recovery_s"] > 0 and row[f"{RESTARTED}/lost_steps"] <= 1 for row in told)
        assert summary["rl_steps"] == steps - 1 and set(summary["score_end"]) == {"sampled", "greedy"}
        assert summary["logprob_gap_mean"] <= 1e-5 and summary["logprob_gap_max"] <= 1e-3
        assert {"driver", "model_worker", "rollout", "engine_core", "reward", "ray"} <= set(summary["peak_rss_mb"])
        assert {"rollout", "update", "sync", "old_logp"} <= set(summary["wall_s"])
        before, after = load_file(job.model / "model.safetensors"), load_file(directory / "model" / "model.safetensors")
        assert before.keys() == after.keys()
        assert any((before[name] != after[name]).any() for name in before)
        assert all(row["routing/rollout_changed_frac"] == 0 and row["actor/grad_norm"] > 0 for row in job.steps())
        assert any((directory / "tensorboard").iterdir()) and (directory / "report.png").stat().st_size > 0
        logs = {path.stem: path.read_text().split(": process ")[0] for path in (directory / "logs").glob("*.log")}
        assert logs.items() >= {"rank-0": "rank 0", "engine-0": "engine 0", **{f"{kind}-0.2": f"{kind} 0" for kind in kinds}}.items()
        assert logs["rewards"] == "", "nothing was printed there"
        assert "Worker pid=" not in job.text(), "nor does the console have what they print"
        started = re.findall(r"^job: (.+): ready after \d+\.\d s$", job.text(), re.MULTILINE)
        assert started == ["Ray", "scoring processes", "model ranks", "engines"]
        assert job.text().splitlines()[-1] == f"job: next: megarl samples {directory} --worst"
        assert job.gone()
