"""SIGTERM to every process, as Slurm warns a job that it preempts, costs no score: the run needs the batch under way to save itself."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from megarl.config import FunctionReward, RewardSettings
from megarl.rewards.processes import ProcessScorer
from megarl.rewards.score import Score, ScoreRequest
from megarl.sandbox.level import Level
from tests.unit.sandbox.levels import grant

CODE = """
import multiprocessing, signal, subprocess, time

def score(response):
    if response == "runs a program":
        return float(subprocess.run(["sleep", "0.7"]).returncode == 0)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(30)
    return float(child.exitcode == -signal.SIGTERM)
"""


@pytest.mark.parametrize("granted", list(Level), ids=str)
def test_sigterm_to_every_process_costs_no_score(granted: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even that of a program which dies of it: its sample is scored once more. The user's own code ends its children by SIGTERM."""
    grant(granted, monkeypatch)
    (tmp_path / "warned_scores.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    warned = list[int]()

    def warn() -> None:
        below = psutil.Process().children(recursive=True)
        if not warned and "sleep" in [one.name() for one in below]:
            warned.extend(one.pid for one in below)
            for pid in warned:
                os.kill(pid, signal.SIGTERM)

    def ask(*responses: str) -> list[Score]:
        return scorer.score([ScoreRequest("", response, "", {}, True) for response in responses])

    with ProcessScorer(RewardSettings(source=FunctionReward(path="warned_scores:score"), workers=2), look=warn) as scorer:
        pids = [one.pid for one in scorer._processes]
        assert ask(*["runs a program"] * 4, "ends a child") == [Score(1.0)] * 5
        assert set(pids) <= set(warned) and [one.pid for one in scorer._processes] == pids, "the same ones go on"
