"""A node that is lost, of a cluster with a token: it is noticed, its places are given up for others, and what its ranks had copied is on
the next machine."""

from pathlib import Path

import pytest

from tests.unit.cluster.test_nodes import joined

PROGRAM = """
    import json, os, signal, sys, time
    from pathlib import Path
    import psutil, ray
    from megarl.cluster.actor_group import ActorGroup
    from megarl.cluster.placement import ProcessKind
    from megarl.cluster.reserve import NoNodes, free_nodes, release, lost_nodes, reserve
    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings
    from megarl.host.shared_memory import SharedMemory
    from megarl.resume.copies import Copies

    told, sys.stdout = sys.stdout, sys.stderr  # Ray prints there that the node is gone
    SIZE = 40_000_000  # three pieces

    class Rank:
        def __init__(self, rank):
            self.rank, self.held = rank, []

        def node(self):
            return ray.get_runtime_context().get_node_id()

        def copy(self, copy_store, group, step, last):
            memory = SharedMemory(SIZE, "test")
            memory.memory[:] = bytes([10 * self.rank + step]) * SIZE
            self.held.append(memory)
            ray.get(copy_store.forget.remote((group, self.rank), last))
            ray.get(copy_store.keep.remote((group, self.rank), step, memory.path, SIZE))

        def restore(self, copy_store, group, step):
            path, size = ray.get(copy_store.place.remote((group, self.rank), step))
            found = Path(path).read_bytes()
            return size, found[0], found.count(found[:1])

    def started(places):
        kind = ray.remote(num_cpus=1, num_gpus=1)(Rank)
        return ActorGroup("rank", [kind.options(scheduling_strategy=place).remote(rank) for rank, place in enumerate(places)])

    with ray_session(ClusterSettings(address=sys.argv[1], interface="lo"), actors=0):
        limit = time.monotonic() + 100
        while len(free_nodes()) < int(sys.argv[3]) and time.monotonic() < limit:
            time.sleep(0.1)
        [places] = reserve([ProcessKind("ranks", 2, 1)], 60.0, grows=True)
        group, alone, twice = started(places), Copies(peers=False), Copies(peers=True)
        nodes = group.call("node", timeout_s=60)
        for step in (1, 2, 3):
            alone.save(step, {"a": group}, 60, f"alone {step}")
            twice.save(step, {"b": group}, 60, f"twice {step}")
        ray.get(twice._travelling, timeout=60)
        print(json.dumps([len(set(nodes)), lost_nodes(places), alone.newest(), twice.newest()]), file=told)

        running = {one.pid: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
        [raylet] = [pid for pid, line in running.items() if "raylet/raylet " in line and nodes[0] in line]
        os.kill(raylet, signal.SIGKILL)
        while not lost_nodes(places) and time.monotonic() < limit:
            time.sleep(0.1)
        release(places)
        begun = time.monotonic()
        try:
            reserve([ProcessKind("ranks", 3, 1)], 60.0, grows=False)
        except NoNodes as error:
            print(json.dumps([str(error), time.monotonic() - begun]), file=told)
        [places] = reserve([ProcessKind("ranks", 2, 1)], 60.0, grows=False)
        group = started(places)
        after = group.call("node", timeout_s=60)
        print(json.dumps([nodes[0] in after, lost_nodes(places), alone.newest(), twice.newest()]), file=told)
        where = {"b": ActorGroup("rank", group.actors)}
        twice.load(3, where, 60)
        stores = [twice._store(node) for node in after]
        print(json.dumps(ray.get([actor.restore.remote(store, "b", 3) for actor, store in zip(group.actors, stores)])), file=told)
"""


FAST = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "30000", "RAY_health_check_failure_threshold": "3"}


def test_a_spare_node_takes_the_places_of_a_lost_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FAST.items():
        monkeypatch.setenv(name, value)
    [before, (refusal, waited), after, restored], error = joined("token", tmp_path, [0, 1, 1, 1], [], PROGRAM)
    assert "which asks for a token\n" in error
    assert before == [2, False, [3, "alone 3"], [3, "twice 3"]]
    assert refusal.startswith("cluster: 3 GPUs are asked for") and refusal.endswith("there are 2 (1, 1, 0); no other node will join")
    assert waited < 5
    assert after == [False, False, None, [3, "twice 3"]]
    assert restored == [[40_000_000, 3, 40_000_000], [40_000_000, 13, 40_000_000]]
