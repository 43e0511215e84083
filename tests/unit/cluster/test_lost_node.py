"""A node that is lost: it is noticed, its places are given up for others, and what its ranks had copied is on the next machine."""

from __future__ import annotations

from pathlib import Path

from tests.unit.cluster.test_nodes import joined

PROGRAM = """
    import json, os, signal, sys, time
    import psutil, ray
    from megarl.cluster.actor_group import ActorGroup, WorkerDied
    from megarl.cluster.placement import Kind
    from megarl.cluster.reserve import free_nodes, give_back, lost_nodes, reserve
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings
    from megarl.shared_memory import SharedMemory, mapped
    from megarl.workers.keeper import Copies

    SIZE = 40 << 20  # three pieces

    class Rank:
        def __init__(self, rank):
            self.rank, self.held = rank, []

        def node(self):
            return ray.get_runtime_context().get_node_id()

        def copy(self, keeper, group, step, last):
            memory = SharedMemory(SIZE, "test")
            memory.bytes_B[:] = 10 * self.rank + step
            self.held.append(memory)
            ray.get(keeper.forget.remote((group, self.rank), last))
            ray.get(keeper.keep.remote((group, self.rank), step, memory.path, SIZE))

        def restore(self, keeper, group, step):
            return mapped(*ray.get(keeper.place.remote((group, self.rank), step))).unique().tolist()

    def started(places):
        kind = ray.remote(num_cpus=1, num_gpus=1)(Rank)
        return ActorGroup("rank", [kind.options(scheduling_strategy=place).remote(rank) for rank, place in enumerate(places)])

    with ray_session(ClusterSettings(address=sys.argv[1], interface="lo"), actors=0):
        limit = time.monotonic() + 100
        while len(free_nodes()) < int(sys.argv[3]) and time.monotonic() < limit:
            time.sleep(0.1)
        [places] = reserve([Kind("ranks", 2, 1)], 60.0)
        group, alone, twice = started(places), Copies(peers=False), Copies(peers=True)
        nodes = group.call("node", timeout_s=60)
        for step in (1, 2, 3):
            alone.save(step, {"a": group}, 60, f"alone {step}")
            twice.save(step, {"b": group}, 60, f"twice {step}")
        ray.wait(twice._travelling, num_returns=2, timeout=60)
        print(json.dumps([len(set(nodes)), lost_nodes(places), alone.newest(), twice.newest()]))

        running = {one.pid: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
        [raylet] = [pid for pid, line in running.items() if "raylet/raylet " in line and nodes[0] in line]
        os.kill(raylet, signal.SIGKILL)
        try:
            group.call("node", timeout_s=60)
        except WorkerDied as error:
            print(json.dumps(str(error)[:20]))
        while not lost_nodes(places) and time.monotonic() < limit:
            time.sleep(0.1)
        give_back(places)
        [places] = reserve([Kind("ranks", 2, 1)], 60.0)
        group = started(places)
        after = group.call("node", timeout_s=60)
        print(json.dumps([nodes[0] in after, lost_nodes(places), alone.newest(), twice.newest()]))
        where = {"b": ActorGroup("rank", group.actors)}
        twice.load(3, where, 60)
        keepers = [twice._keeper(node) for node in after]
        print(json.dumps(ray.get([actor.restore.remote(keeper, "b", 3) for actor, keeper in zip(group.actors, keepers)])))
"""


def test_what_a_lost_node_held_is_on_the_next_one_and_its_places_are_taken_by_a_spare(tmp_path: Path) -> None:
    [before, died, after, restored], _ = joined("token", tmp_path, [0, 1, 1, 1], [], PROGRAM)
    assert before == [2, False, [3, "alone 3"], [3, "twice 3"]]
    assert died == "node: rank 0 died (T"
    assert after == [False, False, None, [3, "twice 3"]]
    assert restored == [[3], [13]]
