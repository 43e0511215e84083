"""Actors as the driver sees them, in the lab's Ray session."""

import os

import pytest
import ray

from megarl.cluster import actor_group
from megarl.cluster.actor_group import ActorGroup, WorkerDied

LOST = "agree failed: [/a/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:9887. A crash?"
LATE = "[/a/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"


class Neighbour:
    """Sees a broken connection where the other one dies."""

    def __init__(self, dies: bool) -> None:
        self.dies = dies

    def work(self) -> None:
        if self.dies:
            os._exit(1)
        raise ConnectionError("reset by peer")

    def compute(self, message: str) -> None:
        raise RuntimeError(message)


@pytest.mark.usefixtures("lab")
def test_worker_died_names_the_dead_actor_not_its_neighbours_error() -> None:
    group = ActorGroup("rank", [ray.remote(Neighbour).options(num_cpus=0).remote(dies) for dies in (False, True)])
    ray.get([actor.__ray_ready__.remote() for actor in group.actors])
    with pytest.raises(WorkerDied, match=r"^work: rank 1 died"):
        group.call("work", timeout_s=60)
    with pytest.raises(ConnectionError, match="reset by peer"):
        ActorGroup("rank", group.actors[:1]).call("work", timeout_s=60)


@pytest.mark.usefixtures("lab")
def test_a_lost_connection_counts_as_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a node is lost with all its processes: Ray's news of it come later than the broken connection."""
    monkeypatch.setattr(actor_group, "NODE_DEATH_S", 1.0)
    group = ActorGroup("rank", [ray.remote(Neighbour).options(num_cpus=0).remote(False)])
    lost = r"^compute: rank 0 has lost a process with which it computes \(Connection closed by peer \[10\.0\.0\.2\]:9887\. A crash\?\)$"
    with pytest.raises(WorkerDied, match=lost):
        group.call("compute", LOST, timeout_s=60)
    with pytest.raises(RuntimeError, match="Timed out waiting") as late:
        group.call("compute", LATE, timeout_s=60)
    assert not isinstance(late.value, WorkerDied)
