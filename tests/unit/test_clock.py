"""The wall clock jumps, as NTP or a person sets it: no wait ends sooner or later for that, and no measure is of it.

That nothing of megarl reads it, test_import_law.py says; here, with the libraries that megarl waits with.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import cycle
from pathlib import Path

import pytest

from megarl.cluster.scan import Scan
from megarl.config import FunctionReward, RewardSettings
from megarl.observe.phases import Phases
from megarl.rewards.processes import ProcessScorer
from megarl.rewards.score import RewardUnavailable, ScoreRequest
from tests.unit.rewards.test_http import length_of, score, serving, settings

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the wall clock finds it hours ahead of the last one, or behind it."""
    true, jumps = time.time, cycle((6 * HOUR_S, -18 * HOUR_S, 24 * HOUR_S, 0.0))
    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * time.time()))
    assert abs(time.time() - time.time()) > HOUR_S


def test_a_scorer_has_its_time_and_no_more() -> None:
    source = FunctionReward(path="tests.unit.sandbox.hostile:score")
    given = RewardSettings(source=source, timeout_s=1.0, workers=1, require_finished=False)
    begun = time.monotonic()
    with ProcessScorer(given) as scorer:
        right, late, again = scorer.score([ScoreRequest("", name, "", {}, True) for name in ("right", "deaf_loop", "right")])
    assert right.value == again.value == 1.0 and late.error == "timeout"
    assert 1.0 <= time.monotonic() - begun < HOUR_S


def test_a_server_has_its_time_and_no_more() -> None:
    with serving(length_of) as server:
        assert score(settings(server.url), "four")[0].value == 4.0
    with serving(lambda handler, body: time.sleep(0.5)) as silent:
        begun = time.monotonic()
        with pytest.raises(RewardUnavailable):
            score(settings(silent.url, timeout_s=0.2, deadline_s=1.0), "four")
        assert 0.2 <= time.monotonic() - begun < HOUR_S


def test_a_process_that_stands_still_does_so_for_as_long_as_it_has() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        try:
            scan = Scan(os.getpid())
            os.kill(child.pid, signal.SIGSTOP)
            while "T" not in Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]:
                time.sleep(0.01)
            begun = time.monotonic()
            assert scan.stopped(0) == [], "seen for the first time"
            time.sleep(0.05)
            assert scan.stopped(HOUR_S) == []
            [still] = [one for one in scan.stopped(0.02) if child.pid in one.pids]
            assert 0.05 <= still.seconds <= time.monotonic() - begun
        finally:
            child.kill()


def test_phases_are_as_long_as_they_were() -> None:
    phases, begun = Phases(), time.monotonic()
    with phases("rollout"):
        threading.Event().wait(0.02)
    assert 0.02 <= phases.total()["rollout"] <= sum(phases.total().values()) <= time.monotonic() - begun + 0.01
