"""The nodes of a Slurm job as a Ray session: who is missing, who is unfit and has to leave, who has died, and when the run is to stop."""

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
import torch

from megarl.cluster import allocation as allocation_module
from megarl.cluster import fitness
from megarl.cluster.allocation import Allocation, HeadNode
from megarl.cluster.join import _wait_for_head
from megarl.cluster.preflight import Report, bound, faults, preflight, report
from megarl.cluster.session import CACHES, _own_caches
from megarl.cluster.shared_files import content, fresh_file
from megarl.errors import ConfigError
from megarl.parallel import backend
from megarl.parallel.backend import touch_gpus
from megarl.parallel.links import edges, slow
from tests.e2e.job import read
from tests.unit.cluster.nodes import bubblewrap

ROOT = Path(__file__).resolve().parents[3]
GOOD = Report(versions={"torch": "2.13.0", "ray": "2.60.0"}, gpus=8, cpus=96, files=65536, free_gb=100.0, unseen=())

# The head of three nodes, one of which never comes; the others are processes of this machine.
HEAD = """
    import os, signal, sys
    import time
    from contextlib import suppress
    from pathlib import Path
    from ray._private import worker
    from megarl.cluster import membership, on_node, preflight, session
    from megarl.cluster.allocation import Allocation
    from megarl.config import ClusterSettings

    membership.SPARE_S = 1.0
    directory = Path(sys.argv[1])
    allocation = Allocation.read(directory)
    settings = ClusterSettings(gpus=False, allocation=directory, interface="lo", start_timeout_s=300)
    with suppress(InterruptedError), session.ray_session(settings, actors=1):
        print(">joined", sorted(node["NodeName"] for node in on_node.live_nodes().values()))
        for gpus, needed, seconds, says in ((False, 3, 0.5, None), (True, 2, 300, None), (False, 3, 300, "c"), (False, 2, 300, "c")):
            if says:
                allocation.exclude(says, "cannot join")
            asked, begun = Allocation(directory, allocation.nodes, needed, allocation.gpus), time.monotonic()
            try:
                print(">", membership.wait_for_nodes(asked, gpus, seconds), sep="")
            except membership.TooFewNodes as error:
                print(">", error, error.bad, sep="")
            assert time.monotonic() - begun < 100, "nobody waits for what cannot come"
        for sick in "ab":  # in the place of a test of its GPUs
            preflight.unfit = lambda *_: {sick: "GPU 1: has fallen off the bus"}
            try:
                preflight.send_away(allocation, True, {}, 300)
            except membership.TooFewNodes as error:
                print(">", error, sep="")
        print(">joined", sorted(node["NodeName"] for node in on_node.live_nodes().values()))
        print(">", membership.died({"a", "b"}), sep="")
        server = worker._global_node.all_processes["gcs_server"][0].process
        for kind in ("gcs_server", "raylet"):  # a preemption's SIGTERM reaches neither, nor what they start
            worker._global_node.all_processes[kind][0].process.send_signal(signal.SIGTERM)
        time.sleep(1)
        print(">", worker._global_node.dead_processes(), sep="")
        server.kill()
        server.wait()
        raise InterruptedError
    print(">", (directory / "lost").read_text().strip(), sep="")
    print(">", "SLURM_JOB_ID" in os.environ, sep="")
"""


@pytest.mark.long
def test_a_session_over_nodes_names_those_that_are_missing_unfit_or_dead(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text('{"nodes": ["a", "b", "c"], "needed": 2, "gpus": 8}')
    here = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_ID": "1"}
    join = subprocess.Popen(
        [sys.executable, "-m", "megarl.cluster.join", tmp_path],
        env={**here, "SLURMD_NODENAME": "b"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        command = [sys.executable, "-c", textwrap.dedent(HEAD), str(tmp_path)]
        done = subprocess.run(command, env={**here, "SLURMD_NODENAME": "a"}, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        said, _ = join.communicate(timeout=60)
    finally:
        join.kill()
    assert join.returncode == 1 and "b leaves: GPU 1: has fallen off the bus" in said, said
    assert "goes on without c, which is missing" in done.stderr and "2 nodes have passed the test" in done.stderr
    lines = [line[1:] for line in done.stdout.splitlines() if line.startswith(">")]
    two, missing, unfit, failed, without, first, one, dead, terminated, lost, foreign = lines
    assert terminated == "[]"
    assert (two, one, foreign) == ("joined ['a', 'b']", "joined ['a']", "False")
    assert missing.startswith("2 of 3 nodes have joined") and missing.endswith("and the run needs 3: c is missing{'c': 'is missing'}")
    assert unfit.startswith("2 of 3 nodes cannot take part, and the run needs 2: a has 0 of 8 GPUs; b has 0 of 8 GPUs{")
    assert failed == "1 of 3 nodes cannot take part, and the run needs 3: c cannot join{'c': 'cannot join'}"
    assert first == "the first node cannot go on: a GPU 1: has fallen off the bus"
    assert without == "{'c': 'cannot join'}"
    assert dead == "{'b': 'died'}"
    assert lost == "Ray's gcs_server has ended (exit code -9)" and not (tmp_path / "bad-a").exists(), "no node is to blame"
    assert not (tmp_path / "head.json").exists()


# The head of two nodes, one of which does not see the model.
FAILING = """
    import os, sys
    from pathlib import Path
    from megarl.cluster import on_node, session
    from megarl.config import ClusterSettings, ConfigError
    from megarl.errors import Unfit

    directory, model, faulty = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    settings, usual = ClusterSettings(gpus=False, allocation=directory, interface="lo", start_timeout_s=300), os.environ["TMPDIR"]
    faults = [Unfit("CUDA shows no GPU"), ConfigError("model.megatron: refused")]
    for temporary, fault in (("/missing", None), *((usual, fault) for fault in faults[:faulty])):
        os.environ["TMPDIR"] = temporary
        try:
            with session.ray_session(settings, 1, {"model.path": model}):
                print(">joined", sorted(node["NodeName"] for node in on_node.live_nodes().values()))
                raise fault
        except Exception as error:
            lost = directory / "lost"
            print(">", type(error).__name__, ": ", error, "; ", lost.read_text().strip() if lost.exists() else "no node is lost", sep="")
            lost.unlink(missing_ok=True)
            (directory / "bad-a").unlink(missing_ok=True)
"""


@pytest.mark.long
def test_what_a_node_lacks_is_not_reported_as_bad_input(tmp_path: Path) -> None:
    (allocation := tmp_path / "allocation").mkdir()
    (allocation / "nodes.json").write_text('{"nodes": ["a", "b"], "needed": 1, "gpus": 0}')
    (model := tmp_path / "model").mkdir()
    (model / "config.json").touch()
    here = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_CPUS_ON_NODE": "2", "TMPDIR": str(tmp_path)}
    blind = [bubblewrap(), "--dev-bind", "/", "/", "--tmpfs", str(model), "--die-with-parent", sys.executable, "-m", "megarl.cluster.join"]
    join = subprocess.Popen([*blind, str(allocation)], env={**here, "SLURMD_NODENAME": "b"}, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        command = [sys.executable, "-c", textwrap.dedent(FAILING), str(allocation), str(model), "2"]
        done = subprocess.run(command, env={**here, "SLURMD_NODENAME": "a"}, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        _, left = join.communicate(timeout=60)
    finally:
        join.kill()
    assert f"b leaves: does not see model.path={model} as the driver does" in left, left
    missing = "TMPDIR: cannot read /missing: No such file or directory"
    assert [line[1:] for line in done.stdout.splitlines() if line.startswith(">")] == [
        f"ClusterError: {missing}; a: {missing}",
        "joined ['a']",
        "ClusterError: CUDA shows no GPU; no node is lost",
        "joined ['a']",
        "ConfigError: model.megatron: refused; no node is lost",
    ]


ALL = {"a": "GPU 0: no driver", "b": "GPU 0: no driver"}
ANSWERS: list[tuple[dict[str, str | None], dict[str, str]]] = [
    ({"a": None, "b": None}, {}),
    ({"a": None, "b": "GPU 3: ECC error"}, {"b": "GPU 3: ECC error"}),
    ({**ALL}, {}),  # what all of several nodes lack is the fault of none
    ({**ALL, "c": None}, ALL),
    ({"a": "GPU 0: no driver", "b": "does not see x"}, {"a": "GPU 0: no driver", "b": "does not see x"}),  # each has a fault of its own
    ({"a": "GPU 3: ECC error"}, {"a": "GPU 3: ECC error"}),
    ({"a": "transformer-engine: does not load"}, {}),  # of one node nobody can tell
    ({}, {}),
]


@pytest.mark.parametrize(("said", "found"), ANSWERS)
def test_nodes_are_blamed_for_what_only_they_lack(
    said: dict[str, str | None], found: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fitness, "answers", lambda nodes, *_, within_s: {name: said[name] for name in nodes})
    assert fitness.unfit(dict.fromkeys(said, "id"), {}, True, 1.0) == found
    if said:  # the driver itself does not see the model any more
        assert fitness.unfit(dict.fromkeys(said, "id"), {"model.path": tmp_path / "m"}, True, 1.0) == {
            "a": f"does not see model.path={tmp_path}/m"
        }


def test_gpus_are_tested_in_a_process_with_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = fitness.sick_gpus(3, 300.0)
    assert fault is None if torch.version.cuda is None else str(fault).startswith("GPU 0: "), "torch for CPUs: no GPU is to blame"
    assert fitness.sick_gpus(3, 300.0, "import sys; sys.exit(f'GPU {sys.argv[1]}: ECC error')") == "GPU 3: ECC error"
    assert fitness.sick_gpus(3, 300.0, "import os; os.abort()") == "GPU test: ended with status -6"
    assert fitness.sick_gpus(3, 0.5, "import time; time.sleep(600)") == "GPU test: no answer within 0.5 s"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert str(touch_gpus(2)).startswith("GPU 0: ") and touch_gpus(0) is None
    monkeypatch.setattr(torch, "ones", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(backend, "TAKEN", ("division by zero",))
    assert touch_gpus(2) is None, "others have them"


def test_a_node_that_cannot_join_says_why(tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text('{"nodes": ["a", "b"], "needed": 2, "gpus": 0}')
    allocation = Allocation.read(tmp_path)
    here = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_CPUS_ON_NODE": "2", "SLURMD_NODENAME": "b", "TMPDIR": str(tmp_path / "full")}
    done = subprocess.run([sys.executable, "-m", "megarl.cluster.join", tmp_path], env=here, cwd=ROOT, capture_output=True, timeout=300)
    assert done.returncode == 1
    assert allocation.all_excluded() == {"b": f"cannot join: TMPDIR: cannot read {tmp_path}/full: No such file or directory"}


# A process of a job, with one that stands for Ray's: it has a log in the session's directory open for writing.
CANCELLED = """
    import os, signal, subprocess, sys
    from pathlib import Path
    from megarl.cluster.allocation import OVER, Allocation
    from megarl.cluster.session import hosting

    allocation = Allocation(Path(sys.argv[1]), ["a"], 1, 0)
    signal.signal(signal.SIGTERM, lambda *_: print("warned", flush=True))  # as the driver would save
    with allocation.stopped_from_outside(), hosting(60, "lo", "0" * 32, allocation) as scratch:
        with open(scratch.path / "log", "w") as log:
            program = "import os, time; print(os.environ['TRITON_CACHE_DIR'], os.environ['VLLM_CACHE_ROOT'], flush=True); time.sleep(600)"
            other = subprocess.Popen([sys.executable, "-c", program], stdout=log)
        while not (scratch.path / "log").read_text().endswith("\\n"):
            pass
        print(scratch.path, other.pid, (scratch.path / "log").read_text(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # of a preemption: everything is still there
        assert other.poll() is None
        (allocation.directory / OVER).touch()  # as the job's script does when Slurm ends the job
        other.wait(60)
        signal.pause()
"""


def test_a_job_that_is_cancelled_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    here = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "VLLM_CACHE_ROOT": "/the/users"}
    command = [sys.executable, "-c", textwrap.dedent(CANCELLED), str(tmp_path)]
    done = subprocess.run(command, env=here, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    scratch, pid, *caches, warned = done.stdout.split()
    assert warned == "warned" and done.stderr.count("the job ends") == 1, done.stderr
    assert read(f"/proc/{pid}/cmdline") == b"", "it has ended"
    kept = temporary / f"megarl-kernels-{os.geteuid()}"  # for the next start
    assert not Path(scratch).exists() and list(temporary.iterdir()) == [kept] and stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert caches == [str(kept / "triton"), "/the/users"]


def test_compiled_kernels_are_not_kept_in_another_users_folder(tmp_path: Path) -> None:
    assert _own_caches(tmp_path).keys() == CACHES.keys()
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert _own_caches(tmp_path) == {}


def failing_once(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The next call of a method of Path fails, as on a shared disk whose server is busy."""
    usual, calls = getattr(Path, method), list[Path]()

    def once(path: Path, **given: object) -> object:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return usual(path, **given)

    monkeypatch.setattr(Path, method, once)


def test_allocation_files_are_private_and_the_stop_file_raises_sigusr1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = Allocation(tmp_path, ("a",), 1, 0)
    head = HeadNode("10.0.0.1:1", "secret", None, 80, 1.0, False)
    assert allocation.head() is None
    allocation.announce(head)
    assert allocation.head() == head and {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    failing_once(monkeypatch, "read_text")
    assert _wait_for_head(allocation) == head
    allocation.withdraw()
    assert allocation.head() is None
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        (tmp_path / "stop").touch()
        failing_once(monkeypatch, "exists")
        with allocation.stopped_from_outside():
            deadline = time.monotonic() + 60
            while not got and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]


def test_a_shared_disk_that_hangs_does_not_keep_a_run_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, looked = threading.Event(), threading.Event()

    def hanging(path: Path) -> bool:
        looked.set()
        assert goes_on.wait(60)
        return False

    monkeypatch.setattr(allocation_module, "END_S", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", hanging)
        with Allocation(tmp_path, ("a",), 1, 0).stopped_from_outside():
            assert looked.wait(20)
            begun = time.monotonic()
        assert time.monotonic() - begun < 20
        goes_on.set()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (replace(GOOD, versions={**GOOD.versions, "ray": "2.61.0"}), "ray is 2.61.0, and 2.60.0 on a"),
        (replace(GOOD, gpus=7), "has 7 GPUs of 8"),
        (replace(GOOD, files=256), "lets a process open 256 files of 1056"),
        (replace(GOOD, free_gb=0.25), "its own disk has 0.2 GB free of 1"),
        (replace(GOOD, unseen=["the run's directory"]), "does not see the run's directory as the driver does"),
        ("does not answer", "does not answer"),
    ],
)
def test_a_node_that_is_unlike_the_head_or_lacks_something_is_named(wrong: Report | str, why: str) -> None:
    assert faults({"a": GOOD, "b": wrong, "c": GOOD}, "a", gpus=8) == {"b": why}
    assert faults({"a": GOOD, "b": GOOD}, "a", gpus=8) == {}


def test_a_node_whose_processes_are_bound_to_a_core_is_reported() -> None:
    reports: dict[str, Report | str] = {"a": GOOD, "b": replace(GOOD, cpus=1), "c": "does not answer"}
    assert bound(reports, dict.fromkeys("abc", 96)) == ["b lets processes run on 1 of its 96 CPUs (--cpu-bind of Slurm's step?)"]


def test_a_canary_is_on_the_disk_and_a_node_that_sees_it_late_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.pread(file, 99, 0)))
    with fresh_file(tmp_path) as canary:
        written = canary.read_bytes()
        assert written and synced == [written]
        known = content(canary)
    elsewhere = tmp_path / "elsewhere"  # the file as another node of an NFS sees it: first empty, then whole
    elsewhere.touch()
    late = Timer(1.0, elsewhere.write_bytes, [written])
    late.start()
    assert report({"the run's directory": (elsewhere, known)}).unseen == []
    late.join()


def test_a_full_shared_disk_blames_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, asked = shutil.disk_usage(tmp_path)._replace(free=250_000_000), list[Allocation]()
    allocation = Allocation(tmp_path, ("a", "b"), needed=2, gpus=0)
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match=f"^{tmp_path}: the run's disk has 0.2 GB free of 1$"):
        patched.setattr(shutil, "disk_usage", lambda place: full)
        patched.setattr("megarl.cluster.preflight.present", asked.append)
        preflight(allocation, gpus=False, paths={}, timeout_s=1)
    assert not asked, "no node is asked, nor excluded"

    def no_quota(file: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", no_quota)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: cannot write there: Disk quota exceeded$"), fresh_file(tmp_path):
        pass
    assert not list(tmp_path.glob(".seen-*"))


def test_the_slow_node_is_named_whatever_the_speed_of_others() -> None:
    random = np.random.default_rng(1)
    for nodes in range(1, 12):
        rounds = edges(nodes)
        assert all(len({node for edge in pairs for node in edge}) == 2 * len(pairs) for pairs in rounds), "no node twice in a round"
        ring = {frozenset((n, (n + 1) % nodes)) for n in range(nodes)} if nodes > 1 else set()
        assert sorted(map(sorted, ring)) == sorted(sorted(edge) for pairs in rounds for edge in pairs)
        for bad in range(nodes):
            taken = {edge: (9.0 if bad in edge else 1.0) * random.uniform(1, 1.5) for pairs in rounds for edge in pairs}
            best = [min((seconds for edge, seconds in taken.items() if n in edge), default=0.0) for n in range(nodes)]
            assert slow(best, 4.0) == ([bad] if nodes > 2 else []), (nodes, bad)
