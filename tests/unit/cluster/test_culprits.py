"""Whoever is stopped or dies in a real session is named, and nobody else; nothing waits for it without a bound."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from megarl.host.reaper import SILENT, members
from tests.rows import rows

ROOT = Path(__file__).resolve().parents[3]


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=300)


# The head of a job of one node, one of whose own processes is stopped while its driver waits for Ray, or for nodes that are to come.
JOB = """
    import os, signal, sys, threading, time
    from pathlib import Path
    import ray
    from megarl.cli import command as cli
    from megarl.cluster import membership, watch
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings

    directory, victim, when = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    watch.CLOSE_S = 2.0

    def stop():
        os.kill(watch._current._own[victim].pid, signal.SIGSTOP)

    def stop_soon():
        while watch._current is None:
            time.sleep(0.05)
        stop()

    def work():
        settings = ClusterSettings(gpus=False, allocation=directory, interface="lo", start_timeout_s=300, stall_timeout_s=2)
        if when == "waiting for nodes":
            threading.Thread(target=stop_soon, daemon=True).start()
        with ray_session(settings, actors=1):
            stop()
            while True:
                ray.nodes()

    cli._leave_lost_session(cli._guarded(work, None))
"""


LOST = [("raylet", "in a call"), ("gcs_server", "waiting for nodes")]


@pytest.mark.parametrize(("victim", "when"), rows(LOST, LOST[1:]))
def test_a_job_whose_session_is_lost_is_queued_again(tmp_path: Path, victim: str, when: str) -> None:
    """The job script reads `lost`, however the driver ends. The watch is there before the nodes are."""
    nodes = '["a"]' if when == "in a call" else '["a", "b"]'
    (tmp_path / "nodes.json").write_text(f'{{"nodes": {nodes}, "needed": {len(nodes.split(","))}, "gpus": 0}}')
    begun = time.monotonic()
    done = run(JOB, str(tmp_path), victim, when, SLURMD_NODENAME="a", SLURM_CPUS_ON_NODE="2")
    assert done.returncode == 1 and time.monotonic() - begun < 100, done.stderr
    assert (tmp_path / "lost").read_text().startswith(f"Ray's {victim} (pid "), done.stderr
    assert f"Ray's {victim} (pid " in [line for line in done.stderr.splitlines() if line.startswith("megarl: failed: ")][-1]
    assert not list(tmp_path.glob("bad-*")), "no node is to blame"


# A session whose raylet is killed, or whose driver is; the watch has not looked yet.
UNSEEN = """
    import os, signal, sys, time
    import ray
    from megarl.cluster import watch
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings

    with ray_session(ClusterSettings(gpus=False, start_timeout_s=300), actors=1):
        watch._current._ended.set()
        os.kill(watch._current._own["raylet"].pid if sys.argv[1] == "raylet" else os.getpid(), signal.SIGKILL)
        while True:
            ray.put(bytes(1_000_000))
"""


@pytest.mark.parametrize(("victim", "status"), [("raylet", 1), ("driver", -signal.SIGKILL)])
def test_a_driver_killed_silently_leaves_one_error_line(victim: str, status: int) -> None:
    with tempfile.TemporaryDirectory(prefix="ms-") as place:  # a short name: Ray's sockets live below it
        done = run(UNSEEN, victim, TMPDIR=place)  # returns once the reaper, too, has closed its standard error
        assert done.returncode == status and members(place) == [], done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("megarl: failed")]
    assert lines == [f"megarl: failed: {SILENT}"], done.stderr


# A session of which the process that is to clean up is stopped.
REAPER = """
    import os, signal, sys
    import psutil
    from megarl.cluster import session
    from megarl.config import ClusterSettings

    session.REAP_S = 2.0
    with session.ray_session(ClusterSettings(gpus=False, start_timeout_s=300), actors=1):
        [reaper] = [child for child in psutil.Process().children() if any(word.endswith("host/reaper.py") for word in child.cmdline())]
        os.kill(reaper.pid, getattr(signal, sys.argv[1]))
    print("closed")
"""


@pytest.mark.parametrize("number", rows(["SIGSTOP", "SIGKILL"], ["SIGSTOP"]))
def test_a_session_closes_without_its_reaper(number: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ms-") as place:  # a short name: Ray's sockets live below it
        done = run(REAPER, number, TMPDIR=place)
        assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
        assert members(place) == [] and os.listdir(place) == []


# Two ranks that call a third process, and each other's fate.
HELPER = """
    import os, signal, sys, time
    import ray
    from megarl.cluster import watch
    from megarl.cluster.actor_group import ActorGroup
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings
    from megarl.resume.copies import Copies

    class Rank:
        def node(self):
            return ray.get_runtime_context().get_node_id()

        def copy(self, copy_store, group, step, last):
            ray.get(copy_store.forget.remote((group, 0), last))

    with ray_session(ClusterSettings(gpus=False, start_timeout_s=300, stall_timeout_s=1), actors=3):
        group, copies = ActorGroup("rank", [ray.remote(Rank).remote() for _ in range(2)]), Copies(peers=True)
        copies.save(1, {"a": group}, 60, "one")
        [store] = copies._stores.values()
        time.sleep(1)  # the watch knows it
        [pid] = watch._current._roster.pids_of(store)
        os.kill(pid, getattr(signal, sys.argv[1]))
        time.sleep(0.5)
        begun = time.monotonic()
        try:
            copies.save(2, {"a": group}, 60, "two")
        except Exception as error:
            print(">", type(error).__name__, ": ", error, sep="")
        print(">", time.monotonic() - begun < 20, sep="")
        watch.renew()
        copies.newest()
        copies.save(3, {"a": group}, 60, "three")
        print(">goes on")
"""


@pytest.mark.parametrize("number", rows(["SIGKILL", "SIGSTOP"], ["SIGSTOP"]))
def test_a_dead_or_stopped_copy_store_is_not_reported_as_a_rank(number: str) -> None:
    done = run(HELPER, number)
    assert done.returncode == 0, done.stderr
    line, *others = [line[1:] for line in done.stdout.splitlines() if line.startswith(">")]  # Ray prints there as well
    assert others == ["True", "goes on"]
    if number == "SIGKILL":
        assert re.match(r"WorkerDied: copy: the CopyStore that rank \d has called died \(", line), line
    else:
        assert line.startswith("ProcessStalled: copy: ray::CopyStore") and "has been stopped by a signal for" in line
