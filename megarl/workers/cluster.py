"""Ray: a private cluster on this machine (or a running one), places for actors, and waits that are bounded and name who is late."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config import ClusterSettings
from megarl.errors import Stopped
from megarl.workers import reaper as reaper_script
from megarl.workers.ray_start import RayNotStarted, mend

DEATH_S = 5.0  # how long to look for a dead actor once another one has failed


class WorkerDied(RuntimeError):
    """An actor's process is gone."""


class WorkerLate(RuntimeError):
    """An actor did not answer within its bound."""


class ClusterError(Stopped):
    """Ray did not start."""


LOOPBACK = {
    # Ray 2.60 maps 127.0.0.1 to the machine's address (ray/_private/services.py:786) and then listens on every interface, unless
    # it is told that there is no cluster; with loopback as the node's address all its servers bind loopback alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}


@contextlib.contextmanager
def ray_session(settings: ClusterSettings, actors: int) -> Iterator[None]:
    """A Ray session for `actors` actors: joined where `settings.address` names one, else started here and ended on exit.

    A started session listens on loopback only, and asks every peer for a token made for this run, which travels in the environment of
    the children and nowhere else. With `settings.interface` the ranks listen there; Ray's own servers then listen on every interface,
    which it offers no setting against, and the token guards them.
    """
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="token",
        RAY_memory_monitor_refresh_ms="0",
        RAY_worker_niceness="0",  # Ray's 15 leaves its workers a thirtieth of a core that anything else wants too
        RAY_prestart_worker_first_driver="0",  # idle processes would only take cores from the start-up
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        HF_HUB_OFFLINE="1",
    )
    # Ray reads its settings when it is imported, and keeps the first token it meets: both are read again.
    Config.initialize("")
    if settings.address is not None:
        ray.init(address=settings.address, log_to_driver=True)
        try:
            yield
        finally:
            ray.shutdown()
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = settings.interface is not None
    if settings.interface is None:
        os.environ.update(LOOPBACK)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = settings.interface
    mend(settings.start_timeout_s)
    on_termination = signal.getsignal(signal.SIGTERM)
    # A short path: Ray's unix sockets live below it, and their names are limited to 107 bytes.
    scratch = tempfile.mkdtemp(prefix="megarl-")
    temporary = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = scratch  # what the actors leave behind goes with the session
    reaper = subprocess.Popen([sys.executable, "-I", "-S", reaper_script.__file__, scratch], stdin=subprocess.PIPE, start_new_session=True)
    try:
        try:
            ray.init(
                num_cpus=actors + 1,
                object_store_memory=settings.object_store_mb << 20,
                include_dashboard=False,
                log_to_driver=True,
                configure_logging=False,
                _node_ip_address=None if settings.interface is None else interface_address(settings.interface),
                _temp_dir=os.path.join(scratch, "r"),  # Ray opens its directory to everybody; the one above stays private
            )
        except RayNotStarted as error:
            raise ClusterError(str(error)) from error
        signal.signal(signal.SIGTERM, on_termination)  # Ray has put its own there, which leaves without cleaning up
        yield
    finally:
        ray.shutdown()
        del os.environ["RAY_AUTH_TOKEN"], os.environ["TMPDIR"]
        if temporary is not None:
            os.environ["TMPDIR"] = temporary
        reaper.communicate()
        shutil.rmtree(scratch, ignore_errors=True)


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface of this machine. ValueError where it has none."""
    import psutil

    addresses = psutil.net_if_addrs()
    for entry in addresses.get(interface, []):
        if entry.family.name == "AF_INET":
            return str(entry.address)
    raise ValueError(f"cluster.interface: {interface!r} has no IPv4 address here (interfaces: {', '.join(sorted(addresses))})")


@dataclass(frozen=True)
class ActorGroup:
    """Actors of one kind, in rank order."""

    kind: str
    actors: Sequence[Any]

    def start(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The call on every actor with the same arguments; returns the references at once."""
        return [getattr(actor, method).remote(*args, **kwargs) for actor in self.actors]

    def wait(self, references: Sequence[Any], doing: str, timeout_s: float) -> list[Any]:
        """The results in the order of the references, which are those of one or several calls on all actors.

        Raises WorkerDied if an actor is gone, else what the first failing actor raised; WorkerLate after `timeout_s`. Each names the actor.
        """
        names = {reference: f"{self.kind} {index % len(self.actors)}" for index, reference in enumerate(references)}
        pending, deadline = list(references), time.monotonic() + timeout_s
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(names[reference] for reference in pending)
                raise WorkerLate(f"{doing}: no answer within {timeout_s:g} s from {late}")
            for reference in ready:
                try:
                    ray.get(reference)
                except RayError as error:
                    self._raise_death(doing, error)
                    raise_cause(error, names[reference], doing)
        return ray.get(list(references))

    def _raise_death(self, doing: str, error: RayError) -> None:
        """WorkerDied where an actor turns out to be gone: its neighbours see the broken connection sooner than Ray reports the death."""
        alive = {actor.__ray_ready__.remote(): f"{self.kind} {index}" for index, actor in enumerate(self.actors)}
        pending, deadline = list(alive), time.monotonic() + DEATH_S
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return  # busy, and so alive
            for reference in ready:
                try:
                    ray.get(reference)
                except RayActorError as death:
                    death.__cause__ = error
                    raise_cause(death, alive[reference], doing)

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> list[Any]:
        """`start` and `wait`."""
        return self.wait(self.start(method, *args, **kwargs), method, timeout_s)


def raise_cause(error: RayError, name: str, doing: str) -> NoReturn:
    """Raises what went wrong in the actor called `name`, in its own type, or WorkerDied or WorkerLate with that name.

    Ray's wrapper of an actor's exception is an instance of that exception's class too, so it is looked at first.
    """
    cause: BaseException = error
    while isinstance(cause, RayTaskError):  # one wrapper for each actor that the exception went through
        cause = cause.cause
    if isinstance(cause, RayActorError):
        raise WorkerDied(f"{doing}: {name} died ({str(cause).splitlines()[0]})") from error
    if isinstance(cause, GetTimeoutError):
        raise WorkerLate(f"{doing}: no answer in time from {name}") from error
    cause.add_note(f"raised by {name} in {doing}")
    raise cause from error


def reserve(bundles: list[dict[str, float]], timeout_s: float) -> list[PlacementGroupSchedulingStrategy]:
    """One place per bundle, neighbours on one node where possible, so that consecutive ranks share a machine.

    Raises WorkerLate with what was asked and what the cluster has.
    """
    group: PlacementGroup = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_s):
        asked = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in sorted({key for bundle in bundles for key in bundle})}
        raise WorkerLate(f"cluster: {asked} not free within {timeout_s:g} s; the cluster has {ray.cluster_resources()}")
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = sorted(range(len(bundles)), key=lambda index: (nodes[index], index))
    return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in order]
