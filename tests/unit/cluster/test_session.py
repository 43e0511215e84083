"""A private Ray session depends on nothing that stands in the environment, and leaves nothing behind, however its driver ends."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cluster import session
from megarl.config import TrainConfig, load
from megarl.host.reaper import members
from megarl.ranks.megatron_worker import RankSettings, threads
from tests.e2e.job import FOREIGN, Job

ROOT = Path(__file__).resolve().parents[3]

# Prints what a process of a session sees of Ray's variables, how many calls Ray's server remembers, whether the driver's variables are back
# when it is over, and what a call of Ray then finds.
SEES = """
    import os, time, ray
    from ray._private.state import state
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings

    def seen():
        return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}

    before = seen()
    with ray_session(ClusterSettings(gpus=False, start_timeout_s=300), actors=1):
        print(*sorted(ray.get(ray.remote(seen).remote(), timeout=300).values()))
        time.sleep(1.5)  # by default, calls are reported once a second
        print(len(state._get_all_task_events()))
    print(seen() == before)
    try:
        ray.remote(seen).remote()
    except ray.exceptions.RaySystemError as error:
        print(type(error).__name__, ray.is_initialized())
"""

# Ends as a machine's memory killer may end it: with the process that was to clean up.
KILLED = """
    import os, signal, psutil
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings

    with ray_session(ClusterSettings(gpus=False, start_timeout_s=300), actors=1):
        [reaper] = [child for child in psutil.Process().children() if any(word.endswith("host/reaper.py") for word in child.cmdline())]
        reaper.kill()
        os.kill(os.getpid(), signal.SIGKILL)
"""


# Where /dev/shm has room for the object store, until somebody fills it.
FULL = """
    import contextlib, subprocess, numpy as np, ray
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=240m", "small", "/dev/shm"], check=True)
    with ray_session(ClusterSettings(gpus=False, start_timeout_s=300), actors=1):
        with open("/dev/shm/hog", "wb", buffering=0) as hog, contextlib.suppress(OSError):
            while True:
                hog.write(bytes(1 << 20))
        print(ray.get(ray.remote(lambda: np.ones(60 << 20, np.uint8)).remote(), timeout=300).sum() >> 20)
"""


# Asks every listening port of a session, without its token and with a wrong one, for what would control it. Then ends Ray's server by a
# call that it looks at before it looks for a token (ray_syncer_server.cc:30).
UNINVITED = """
    import os, time, grpc, psutil, ray
    from megarl.cluster import watch
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings

    METHODS = (
        "NodeInfoGcsService/GetAllNodeInfo", "InternalKVGcsService/InternalKVPut", "ActorInfoGcsService/RegisterActor",
        "NodeManagerService/RequestWorkerLease", "CoreWorkerService/PushTask", "CoreWorkerService/KillActor", "ObjectManagerService/Pull",
    )

    def listening():
        ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return {one.laddr.port: process for process in ours for one in process.net_connections("tcp") if one.status == "LISTEN"}

    def asked(port, method, token):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=60, metadata=[("authorization", token)] if token else [])
                return "answered"
            except grpc.RpcError as error:
                return error.code().name

    with ray_session(ClusterSettings(gpus=False, start_timeout_s=300, stall_timeout_s=1), actors=1):
        actor = ray.remote(type("Worker", (), {"here": lambda self: True})).remote()
        ray.get(actor.here.remote())
        ports = listening()
        print(oct(os.stat(os.environ["TMPDIR"]).st_mode & 0o777), len(ports))
        for port in ports:
            print(*sorted({asked(port, method, token) for method in METHODS for token in (None, "Bearer x")}))
        print(ray.get(actor.here.remote()))
        [server] = [port for port, process in ports.items() if process.name() == "gcs_server"]
        asked(server, "syncer.RaySyncer/StartSync", None)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.1)
            watch.check("sync", {"rank": []})
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary directory of a short name: Ray's sockets live below it."""
    path = Path(tempfile.mkdtemp(prefix="ms-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run(program: str, place: Path, *before: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT), **more}
    command = [*before, sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_a_session_ignores_ray_variables_and_removes_a_killed_sessions_remains(place: Path) -> None:
    assert run(KILLED, place).returncode == -9
    [left] = place.iterdir()
    done = run(SEES, place, **FOREIGN)
    assert done.returncode == 0, done.stderr
    seen, remembered, restored, late = done.stdout.splitlines()
    assert (remembered, restored, late) == ("0", "True", "RaySystemError False")
    assert not any(value in seen.split() for name, value in FOREIGN.items() if name.startswith("RAY_"))
    assert f"megarl: cleaned up after a killed run: removed {left}, ended " in done.stderr
    assert members(str(place)) == [] and list(place.iterdir()) == []


def test_a_session_refuses_callers_without_its_token(place: Path) -> None:
    done = run(UNINVITED, place)
    [modes, *answers, still] = done.stdout.splitlines()
    mode, ports = modes.split()
    assert mode == "0o700", "where the Unix sockets are"
    assert int(ports) == len(answers) >= 5 and set(answers) == {"UNAUTHENTICATED UNIMPLEMENTED"}, done.stdout
    assert still == "True" and done.returncode == 1
    assert "ProcessStalled: sync: Ray's gcs_server has ended (exit code " in done.stderr
    assert members(str(place)) == [] and list(place.iterdir()) == []


def test_a_full_dev_shm_does_not_end_the_object_store(place: Path) -> None:
    own_mounts = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*own_mounts, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = run(FULL, place, *own_mounts)
    assert done.returncode == 0 and done.stdout == "60\n", done.stderr


def test_a_temporary_directory_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("n" * 50)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    scratch = session._scratch()
    try:
        assert scratch.path.parent == Path("/tmp") and list(long.iterdir()) == []
    finally:
        scratch.remove()


@pytest.mark.parametrize(
    ("wish", "most"), [("64", 64), ("1", 1), ("0", 1), ("4,2", 1), ("many", 1), ("", 1), ("9" * 5000, 1), ("\u0663", 3)]
)
def test_a_rank_has_no_more_threads_than_there_are_cores(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, wish: str, most: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wish)
    config = load(Job(tmp_path, tiny_model).write(), [], TrainConfig)
    assert threads(RankSettings.of(config, config.layout)) == min(most, len(os.sched_getaffinity(0)))
