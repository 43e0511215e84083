"""A process that is stopped, and not dead, ends the run within its bound, and is named; unless it is a sandbox's."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.cluster.actor_group import ActorGroup
from megarl.cluster.scan import Scan
from megarl.cluster.server import ProcessStalled
from megarl.cluster.watch import watched
from tests.e2e.job import Job
from tests.e2e.kill_at import titled
from tests.e2e.lab import Lab
from tests.e2e.test_environments import GAME


def test_a_scan_finds_what_is_stopped_below_a_process_and_forgets_what_goes_on() -> None:
    sleep = "import time; time.sleep(600)"
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleep!r}]); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            scan = Scan(parent.pid)
            assert scan.stopped(0) == []
            os.kill(pid, signal.SIGSTOP)
            while "T" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                time.sleep(0.01)
            assert scan.stopped(0) == [], "seen for the first time"
            time.sleep(0.05)
            [still] = scan.stopped(0.02)
            assert still.pids[:2] == (pid, parent.pid) and "time.sleep(600)" in still.title and still.seconds >= 0.05
            assert scan.stopped(60) == []
            os.kill(pid, signal.SIGCONT)
            while "T" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                time.sleep(0.01)
            assert scan.stopped(0) == []
        finally:
            os.kill(pid, signal.SIGKILL)
    assert Scan(parent.pid).stopped(0) == [], "of a process that has ended"


def test_a_stopped_rank_ends_the_run_and_is_named(lab: Lab, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank waits for it, and is not named."""
    wait, stopped = ActorGroup.wait, list[int]()

    def stopping(group: ActorGroup, references: Sequence[Any], what: str, timeout_s: float, *helpers: Any) -> list[Any]:
        if what == "update" and not stopped:
            stopped.append(lab.playing[1])
            os.kill(stopped[0], signal.SIGSTOP)
        return wait(group, references, what, timeout_s, *helpers)

    job = Job(tmp_path, tiny_model, ("train.steps=2", "layout={ranks: 2, tp: 2, ep: 2}"))
    with watched(2.0, own=True), monkeypatch.context() as patch:
        patch.setattr(ActorGroup, "wait", stopping)
        begun = time.monotonic()
        with pytest.raises(ProcessStalled, match=r"^update: rank 1: ray::Player[.\w]* \(pid \d+\) has been stopped by a signal for \d s$"):
            lab.run(job)
        assert stopped and time.monotonic() - begun < 120
    with suppress(ProcessLookupError):  # in a session that goes on, as the lab's does; a run ends all of its processes
        os.kill(stopped[0], signal.SIGKILL)


class Judge(BaseHTTPRequestHandler):
    """Answers a request without samples, and no other."""

    asked, over = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        if json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]:
            self.asked.set()
            self.over.wait(300)
        answer = b'{"scores": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.mark.long
def test_a_stopped_rank_is_seen_while_a_judge_is_silent(tmp_path: Path, tiny_model: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = f"{{type: http, url: 'http://127.0.0.1:{server.server_port}/score', timeout_s: 300}}"
        job = Job(tmp_path, tiny_model, (f"reward.source={source}", "cluster.stall_timeout_s=2", "cluster.restarts=0")).start()
        try:
            job.wait_for("the question", Judge.asked.is_set)
            [rank] = titled(job, "ray::ModelWorker")
            os.kill(rank, signal.SIGSTOP)
            assert job.finish(60) == 1, job.text()[-3000:]
            line = rf"^megarl: failed: ProcessStalled: score: ray::ModelWorker.* \(pid {rank}\) has been stopped by a signal for \d s$"
            assert re.search(line, job.text(), re.MULTILINE) and job.gone(), job.text()[-3000:]
        finally:
            job.kill()
            Judge.over.set()
            server.shutdown()


@pytest.mark.long
def test_an_environment_that_stops_itself_costs_only_its_episode(tmp_path: Path, tiny_model: Path) -> None:
    """In its sandbox, for longer than anything of the run may be stopped."""
    game = [part.replace("games:Letters", "games:Stoppers") for part in GAME]
    settings = (*game, "train.steps=6", "cluster.stall_timeout_s=1", "cluster.restarts=0")
    job = Job(tmp_path, tiny_model, settings).start()
    begun, last = dict[int, float](), dict[int, float]()
    try:
        while job.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                for one in psutil.Process(job.process.pid).children(recursive=True):
                    if one.status() == psutil.STATUS_STOPPED:
                        begun.setdefault(one.pid, time.monotonic())
                        last[one.pid] = time.monotonic()
            time.sleep(0.2)
        assert job.finish() == 0 and job.gone(), job.text()[-3000:]
    finally:
        job.kill()
    assert max(last[pid] - begun[pid] for pid in begun) > 2 and len(job.steps()) == 6
