"""Actors as the driver sees them, in the lab's Ray session."""

from __future__ import annotations

import os

import pytest
import ray

from megarl.cluster.actor_group import ActorGroup, WorkerDied


class Neighbour:
    """Sees a broken connection where the other one dies."""

    def __init__(self, dies: bool) -> None:
        self.dies = dies

    def work(self) -> None:
        if self.dies:
            os._exit(1)
        raise ConnectionError("reset by peer")


@pytest.mark.usefixtures("lab")
def test_a_dead_actor_is_told_and_not_what_its_neighbour_says_of_it() -> None:
    group = ActorGroup("rank", [ray.remote(Neighbour).options(num_cpus=0).remote(dies) for dies in (False, True)])
    ray.get([actor.__ray_ready__.remote() for actor in group.actors])
    with pytest.raises(WorkerDied, match=r"^work: rank 1 died"):
        group.call("work", timeout_s=60)
    with pytest.raises(ConnectionError, match="reset by peer"):
        ActorGroup("rank", group.actors[:1]).call("work", timeout_s=60)
