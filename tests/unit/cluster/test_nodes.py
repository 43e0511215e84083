"""Clusters that somebody else has started: joined as they are; ranks and engines on the nodes that `place` names; one disk for all."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cluster.nodes import LOCAL, TOKEN

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
    import json, os, sys, time
    from pathlib import Path
    import ray
    from megarl.cluster.reserve import free_nodes, reserve
    from megarl.cluster.session import ray_session
    from megarl.cluster.shared_files import check_shared, nodes_of
    from megarl.config import ClusterSettings, Layout, RolloutSettings
    from megarl.cluster.process_kinds import engine_kind, rank_kind

    address, directory, count, shapes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])

    def where():
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")

    found = []
    with ray_session(ClusterSettings(address=address, interface="lo"), actors=0):
        limit = time.monotonic() + 100
        while len(free_nodes()) < count and time.monotonic() < limit:
            time.sleep(0.1)
        gpus = {node.name: node.gpus for node in free_nodes()}
        print(json.dumps(sorted(gpus.values())))
        for ranks, replicas, tp in shapes:
            kinds = [rank_kind("model", Layout(**ranks), True), engine_kind(RolloutSettings(replicas=replicas, tp=tp), True)]
            try:
                fits = sum(kind.processes * kind.gpus for kind in kinds) <= sum(gpus.values())
                places = reserve(kinds, 60.0 if fits else 2.0, grows=True)  # what the shape before had is given back a little later
            except Exception as error:
                print(json.dumps(f"{type(error).__name__}: {error}"))
                continue
            task = ray.remote(where)
            calls = [
                [task.options(num_cpus=1, num_gpus=kind.gpus, scheduling_strategy=place).remote() for place in own]
                for kind, own in zip(kinds, places, strict=True)
            ]
            went = [ray.get(own, timeout=60) for own in calls]
            print(json.dumps(went))
            assert nodes_of(places[0] + places[1]).keys() == {node for own in went for node, _ in own}
            ray.util.remove_placement_group(places[0][0].placement_group)
        nodes = {node["NodeID"]: "a node" for node in ray.nodes()}
        for written in ({}, {"run_dir": directory}):
            try:
                check_shared(nodes, {"model.path": directory.parent / "model"}, written, 60.0)
                print(json.dumps("shared"))
            except Exception as error:
                print(json.dumps(f"{type(error).__name__}: {error}"))
"""
SHAPES: list[tuple[dict[str, int], int, int]] = [
    ({"ranks": 2, "tp": 2}, 2, 4),
    ({"ranks": 4, "ep": 4}, 3, 2),
]
FURTHER: list[tuple[dict[str, int], int, int]] = [({"ranks": 6}, 1, 4), ({"ranks": 4, "tp": 2}, 6, 1)]  # with --long
TOO_LARGE: tuple[dict[str, int], int, int] = ({"ranks": 2}, 3, 4)


def joined(mode: str, tmp_path: Path, gpus: list[int], shapes: list[Any], program: str = PROGRAM) -> tuple[list[Any], str]:
    """What a program says of a cluster of that mode, and its standard error."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "model").mkdir()
    environment = {**os.environ, **LOCAL, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}  # where Ray would look for a token
    for name in [name for name in environment if name.startswith("RAY_AUTH") or name == "CUDA_VISIBLE_DEVICES"]:
        del environment[name]
    script = [sys.executable, "-m", "tests.unit.cluster.nodes", mode, str(runs), *map(str, gpus)]
    cluster = subprocess.Popen(script, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert cluster.stdout is not None
        address = next(line.strip() for line in cluster.stdout if line.startswith("127.0.0.1:"))
        command = [sys.executable, "-c", textwrap.dedent(program), address, str(runs), str(len(gpus)), json.dumps(shapes)]
        own = {"RAY_AUTH_TOKEN": TOKEN} if mode == "token" else {"RAY_AUTH_MODE": "token"}  # the one is needed, the other misleads
        done = subprocess.run(command, cwd=ROOT, env={**environment, **own}, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()], done.stderr
    finally:
        cluster.communicate(timeout=60)


def test_a_cluster_without_a_token_runs_and_a_node_without_the_model_is_named(tmp_path: Path, long: bool) -> None:
    shapes = SHAPES + FURTHER * long
    [gpus, *said, read, written], error = joined("disabled", tmp_path, [2, 4, 4], [*shapes, TOO_LARGE])
    assert gpus == [2, 4, 4] and "which asks for no token" in error
    for (layout, _, tp), found in zip(shapes, said[:-1], strict=True):
        ranks, engines = found
        together = max(layout.get("tp", 1), layout.get("ep", 1))
        for first in range(0, len(ranks), together):
            assert len({node for node, _ in ranks[first : first + together]}) == 1
        assert all(len(visible.split(",")) == tp for _, visible in engines)
        taken = [(node, gpu) for node, visible in [*ranks, *engines] for gpu in visible.split(",")]
        assert len(taken) == len(set(taken)), "no GPU is given twice"
    assert said[-1].startswith("WorkerLate: cluster: 14 GPUs are asked for") and "there are 10 (4, 4, 2), after 2 s" in said[-1]
    assert read == "shared"
    assert written == f"Unfit: run_dir: {tmp_path}/runs is not, on a node, what it is here: every machine of a run must see the same disk"


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        from megarl.cluster.session import ray_session
        from megarl.config import ClusterSettings
        with ray_session(ClusterSettings(address="127.0.0.1:1", interface="lo"), actors=0):
            pass
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("megarl.cluster.session.ClusterError: cluster.address=127.0.0.1:1: ")
