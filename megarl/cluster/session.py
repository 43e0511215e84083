"""A Ray session: a private one on this machine, or a running cluster that is joined."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import ray
from ray._private import auto_init_hook, ray_constants, services
from ray._private import worker as ray_worker
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient
from ray.exceptions import AuthenticationError, RayError, RpcError

from megarl.cluster import server, watch
from megarl.cluster.allocation import Allocation, HeadNode, cpus_here, forget_launcher
from megarl.cluster.fitness import unfit
from megarl.cluster.machine import gpus_here
from megarl.cluster.membership import TooFewNodes, died, present, tell, wait_for_nodes
from megarl.cluster.on_node import live_nodes
from megarl.cluster.preflight import preflight
from megarl.cluster.ray_start import RayNotStarted, mend
from megarl.cluster.watch import watched
from megarl.errors import ConfigError, Stopped, Unfit
from megarl.host import reaper as reaper_script
from megarl.host import termination
from megarl.host.scratch import SHORT, Scratch, sweep

if TYPE_CHECKING:  # a node that joins needs neither this module nor torch
    from megarl.config import ClusterSettings


class ClusterError(Stopped):
    """Ray did not start, or a machine of a job is unfit for the run."""


NOTHING: Mapping[str, Path] = MappingProxyType({})
LOOPBACK = {
    # Ray 2.60 maps 127.0.0.1 to the machine's address (ray/_private/services.py:786) and then listens on every interface, unless
    # it is told that there is no cluster; with loopback as the node's address, all its servers bind to loopback only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
# A node that does not answer counts as dead after some 15 s, and one that has lost its head ends itself; Ray's defaults take a minute.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
}
# What Ray keeps about past work for a dashboard, which a private session lacks. Each is in proportion to the length of a run.
FORGETFUL = {
    "RAY_task_events_report_interval_ms": "0",  # its server would keep the last 100,000 calls: 46 kB a step of a tiny run
    "RAY_event_stats_print_interval_ms": "0",  # each process would log a page of statistics a minute; with -1, Ray 2.60 logs in a loop
    "RAY_ROTATION_MAX_BYTES": str(16 << 20),  # of a log; Ray's own logs would take 3 GB for each process
    "RAY_ROTATION_BACKUP_COUNT": "1",
}
# Caches of compiled kernels: by default in the home directory, where the processes of all nodes would write and lock the same files.
CACHES = {"TRITON_CACHE_DIR": "triton", "FLASHINFER_WORKSPACE_BASE": "flashinfer", "VLLM_CACHE_ROOT": "vllm"}
ANSWER_S = 30.0  # longest wait for an answer from the cluster that is joined
SHUTDOWN_S = 30.0  # longest wait for Ray's own end of a session
REAP_S = reaper_script.LIMIT_S + 10.0  # for the reaper
SOCKET_BYTES = 107  # Linux's limit on the path of a Unix socket


@contextlib.contextmanager
def ray_session(settings: ClusterSettings, actors: int, paths: Mapping[str, Path] = NOTHING) -> Iterator[None]:
    """Open a Ray session for `actors` actors: join the cluster that `settings.address` names, or start one here and end it on exit.

    A session started here listens on loopback only, and asks every peer for a token made for this run. The token reaches child processes
    through their environment and other nodes through a file that only its owner can read, and goes nowhere else. With `settings.interface`
    the ranks listen on that interface; Ray's own servers then listen on every interface, which no setting of Ray's prevents, and the token
    guards them. With `settings.allocation` the other nodes of a Slurm job join the session. It is open once they have joined and passed a
    test, part of which is that they see what the run reads. Files that this user's killed runs left on this machine are swept first.

    Args:
        settings: the section `cluster`.
        actors: the number of actors that the run starts.
        paths: what the run reads, by dotted key.
    """
    auto_init_hook.enable_auto_connect = False  # otherwise a thread that calls Ray when the session is over starts another one
    if settings.allocation is not None:
        allocation = Allocation.read(settings.allocation)
        try:
            sweep()
            server.lose(None)
            with _headed(settings, allocation, paths):
                yield
        except Unfit as error:  # this node is unfit, and was found so before it had a session
            allocation.lose({allocation.here: str(error)})
            raise ClusterError(str(error)) from error
        return
    sweep()
    server.lose(None)
    if settings.address is not None:
        with ray_settings(private=False):
            _join(settings.address)
            try:
                with watched(settings.stall_timeout_s, own=False):
                    yield
            finally:
                _shut_down()
    else:
        with (
            hosting(settings.start_timeout_s, settings.interface, secrets.token_hex(32)) as scratch,
            _private(settings, actors + 1, None if settings.gpus else 0, scratch),
            watched(settings.stall_timeout_s, own=True, on_loss=partial(_lost, scratch, None)),
        ):
            yield


def _join(address: str) -> None:
    """Join a running cluster in the mode in which it was started: with a token if it asks for one, otherwise without.

    Ray takes the mode from the environment alone, which was set for whoever started the cluster, but not for whoever starts a run in it.
    Raises ClusterError if nothing answers at the address, or if the cluster asks for a different token from the one that Ray finds here.
    """
    try:
        bootstrap_address = services.canonicalize_bootstrap_address_or_die(address)
        host, _, port = bootstrap_address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()  # Ray would try a refused one for half a minute
        token = _asks_for_token(bootstrap_address)
        _set_mode(token)
        ray.init(address=bootstrap_address, log_to_driver=True)
    except (OSError, AuthenticationError, RpcError, ValueError) as error:
        raise ClusterError(f"cluster.address={address}: {' '.join(str(error).split())}") from error
    way = "asks for a token" if token else "asks for no token: whoever reaches its ports can run code there"
    print(f"megarl: joined the Ray cluster at {bootstrap_address}, which {way}", file=sys.stderr)


def _asks_for_token(address: str) -> bool:
    _set_mode(token=False)
    try:
        GcsClient(address=address).get_all_node_info(timeout=ANSWER_S)
    except AuthenticationError:
        return True
    return False


def _set_mode(token: bool) -> None:
    os.environ["RAY_AUTH_MODE"] = "token" if token else "disabled"
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def ray_settings(private: bool) -> Iterator[None]:
    """Set Ray's environment variables for the block. Those that were set before do not reach a private session or its processes.

    Any of those may lead elsewhere: RAY_ADDRESS to a cluster, RAY_AUTH_TOKEN_PATH to a token, RAY_RUNTIME_ENV_HOOK to code.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    if private:
        _forget_ray_settings()
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_memory_monitor_refresh_ms="0",
        RAY_preallocate_plasma_memory="1",  # otherwise the raylet would die of SIGBUS if others fill /dev/shm later
        RAY_worker_niceness="0",  # Ray's 15 leaves its workers a thirtieth of a core that anything else wants too
        RAY_prestart_worker_first_driver="0",  # idle processes would only take cores from the start-up
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_IGNORE_UNHANDLED_ERRORS="1",  # if an engine is lost, each of its hundred prompts would print a traceback
        HF_HUB_OFFLINE="1",
    )
    try:
        Config.initialize("")  # Ray read its settings when it was imported
        yield
    finally:
        _forget_ray_settings()
        os.environ.update(before)


def _forget_ray_settings() -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]


def _scratch() -> Scratch:
    """Create the session's directory; in /tmp if TMPDIR's path, like those of schedulers, is too long for Unix sockets below it."""
    scratch = Scratch()
    inside = len(f"/r/session_2026-11-22_13-45-17_841150_{os.getpid()}/sockets/plasma_store")
    if len(os.fsencode(scratch.path)) + inside <= SOCKET_BYTES:
        return scratch
    scratch.remove()
    return Scratch(below=SHORT)


def _own_caches(below: Path) -> dict[str, str]:
    """The variables that put caches in a folder on this machine that outlives the session; none if the folder is somebody else's."""
    folder = below / f"megarl-kernels-{os.geteuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            return {name: str(folder / kind) for name, kind in CACHES.items()}
    return {}


@contextlib.contextmanager
def hosting(start_timeout_s: float, interface: str | None, token: str, allocation: Allocation | None = None) -> Iterator[Scratch]:
    """Let Ray's processes be started on this machine inside the block; they and their files go with the block, or with this process.

    Args:
        start_timeout_s: for the start of the processes.
        interface: the interface of their sockets, if other machines are to reach them; None for loopback.
        token: what they ask every peer for.
        allocation: the job whose other machines take part in the session; None if there are none.

    Returns:
        The directory of their files.
    """
    one_of_many = allocation is not None
    with ray_settings(private=True):
        os.environ.update({**FORGETFUL, **(HEALTH if one_of_many else {})}, RAY_AUTH_TOKEN=token)
        _set_mode(token=True)
        local = interface in (None, "lo")
        ray_constants.ENABLE_RAY_CLUSTER = not local
        os.environ.update(LOOPBACK if local else {"GLOO_SOCKET_IFNAME": str(interface)})
        mend(start_timeout_s, one_of_many)
        scratch = _scratch()
        temporary = os.environ.get("TMPDIR")
        for name, place in _own_caches(Path(temporary or SHORT)).items() if one_of_many else ():
            os.environ.setdefault(name, place)  # ranks and engines inherit it
        os.environ["TMPDIR"] = str(scratch.path)  # what the actors leave behind is removed with the session
        command = [sys.executable, "-I", "-S", reaper_script.__file__, str(scratch.path)]
        reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[scratch.lock])
        on_termination = signal.getsignal(signal.SIGTERM)
        if allocation is not None:
            signal.signal(signal.SIGTERM, partial(_on_sigterm, allocation, on_termination, partial(_end_with_the_job, reaper, scratch)))
        try:
            yield scratch
        finally:
            signal.signal(signal.SIGTERM, on_termination)
            del os.environ["TMPDIR"]
            if temporary is not None:
                os.environ["TMPDIR"] = temporary
            _reap(reaper, scratch, over=server.loss() is None)


def _reap(reaper: subprocess.Popen[bytes], scratch: Scratch, *, over: bool) -> None:
    """Let the reaper end what is left of a session, and remove its directory; do both here if it has ended or does not answer.

    Args:
        reaper: a process of `reaper_script`.
        scratch: the session's directory.
        over: the session has been closed, so that nothing should be left.
    """
    try:
        reaper.communicate(reaper_script.OVER if over else b"", timeout=REAP_S)
    except subprocess.TimeoutExpired:
        reaper.kill()
        reaper.wait(REAP_S)
    if reaper.returncode:
        reaper_script.end({os.getpid()}, str(scratch.path), over=over)
    scratch.remove()


def _lost(scratch: Scratch, allocation: Allocation | None, why: str) -> None:
    """Note that the session is lost, for those who outlive this process: the reaper, which need not report it, and the job script."""
    (scratch.path / reaper_script.REPORTED).touch()
    if allocation is not None:
        allocation.fail(why)


def _on_sigterm(allocation: Allocation, usual: Any, end: Callable[[int], NoReturn], number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM in a job, which Slurm sends to its steps when the job ends, and when the grace of a preemption begins.

    Args:
        allocation: says which of the two it is.
        usual: the handler outside the session, by which the driver saves its run; a node that has joined has none, and waits for that.
        end: ends this process and Ray's, since SIGKILL follows.
        number: of the signal.
        frame: where this process is.
    """
    if allocation.is_over():
        end(number)
    if callable(usual) and termination.asked() != number:
        usual(number, frame)


def _end_with_the_job(reaper: subprocess.Popen[bytes], scratch: Scratch, number: int) -> NoReturn:
    """End Ray's processes and this one."""
    signal.signal(number, signal.SIG_IGN)
    tell(f"{signal.Signals(number).name}: the job ends")
    _reap(reaper, scratch, over=False)
    os._exit(128 + number)


@contextlib.contextmanager
def _private(settings: ClusterSettings, cpus: int, gpus: int | None, scratch: Scratch, name: str | None = None) -> Iterator[None]:
    """Start a session whose head is this process."""
    on_termination = signal.getsignal(signal.SIGTERM)
    try:
        try:
            ray.init(
                num_cpus=cpus,
                num_gpus=gpus,
                object_store_memory=settings.object_store_mb << 20,
                include_dashboard=False,
                log_to_driver=True,
                configure_logging=False,
                _node_name=name,
                _node_ip_address=None if settings.interface is None else interface_address(settings.interface),
                _temp_dir=str(scratch.path / "r"),  # Ray opens its directory to everybody; the one above stays private
            )
        except RayNotStarted as error:
            raise ClusterError(str(error)) from error
        signal.signal(signal.SIGTERM, on_termination)  # Ray has installed its own handler, which exits without cleaning up
        yield
    finally:
        _shut_down()


def _shut_down() -> None:
    """Close Ray's session. If that does not end, the session is lost."""
    closing = threading.Thread(target=ray.shutdown, name="shutdown", daemon=True)
    closing.start()
    closing.join(SHUTDOWN_S)
    if closing.is_alive():
        server.lose(f"Ray has not shut down within {SHUTDOWN_S:g} s")
        # What Ray does when this process ends would wait as well (ray/_private/worker.py:2168, 2190).
        atexit.unregister(ray_worker.shutdown)
        sys.excepthook = ray_worker.normal_excepthook


@contextlib.contextmanager
def _headed(settings: ClusterSettings, allocation: Allocation, paths: Mapping[str, Path]) -> Iterator[None]:
    """Open a session over the nodes of a job, with this one as its head. If it fails, tell the job script what died."""
    name, cpus, gpus = allocation.here, cpus_here(), gpus_here() if settings.gpus else 0
    forget_launcher()
    token = secrets.token_hex(32)
    with (
        allocation.stopped_from_outside(),
        hosting(settings.start_timeout_s, settings.interface, token, allocation) as scratch,
        _private(settings, cpus, gpus, scratch, name),
        watched(settings.stall_timeout_s, own=True, on_loss=partial(_lost, scratch, allocation)),
    ):
        before = {name}
        try:
            address = ray.get_runtime_context().gcs_address
            fields = settings.interface, settings.object_store_mb, settings.start_timeout_s, settings.gpus
            allocation.announce(HeadNode(address, token, *fields))
            for node, why in wait_for_nodes(allocation, settings.gpus, settings.start_timeout_s).items():
                tell(f"goes on without {node}, which {why}")
            preflight(allocation, settings.gpus, paths, settings.start_timeout_s)
            before = {node["NodeName"] for node in live_nodes().values()}
            yield
        except TooFewNodes as error:
            allocation.lose(error.bad)
            raise
        except Exception as error:
            if isinstance(error, ConfigError) and not isinstance(error, Unfit):
                raise
            if (loss := watch.loss()) is not None:
                allocation.fail(f"{loss}\n")
            else:
                allocation.lose(died(before) or _unfit(settings, allocation, paths))
            if isinstance(error, Unfit):
                raise ClusterError(str(error)) from error
            raise
        finally:
            allocation.withdraw()


def _unfit(settings: ClusterSettings, allocation: Allocation, paths: Mapping[str, Path]) -> dict[str, str]:
    """The nodes that may be to blame for a failure in which no node has died, and why."""
    with contextlib.suppress(RayError, RuntimeError):
        return unfit(present(allocation), paths, settings.gpus, settings.start_timeout_s)
    return {}


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine. Raises ConfigError if it has none."""
    import psutil

    addresses = psutil.net_if_addrs()
    for entry in addresses.get(interface, []):
        if entry.family.name == "AF_INET":
            return str(entry.address)
    raise ConfigError(f"cluster.interface: {interface!r} has no IPv4 address here (interfaces: {', '.join(sorted(addresses))})")
